# llm_fed on NVIDIA GPUs, in a clone; torch brings CUDA 12.8, and the machine the driver and the NVIDIA Container Toolkit:
#   docker build -f docker/cuda.Dockerfile -t llm-fed:cuda .
#   docker run --rm --gpus all -v "$PWD:/work" llm-fed:cuda run clinics.yaml
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" --entrypoint accelerate llm-fed:cuda \
#     launch --multi_gpu --num_processes 8 --module llm_fed.cli run clinics.yaml
# The user in it has the id 1000; `--user "$(id -u)"` with `-e HOME=/tmp` takes yours, where that is another.
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY llm_fed llm_fed
COPY tasks tasks
COPY eval eval
COPY scripts scripts
RUN python -m venv /opt/llm_fed \
    && /opt/llm_fed/bin/pip install --no-cache-dir torch==2.11.0 --index-url https://download.pytorch.org/whl/cu128 \
    && /opt/llm_fed/bin/pip install --no-cache-dir .

FROM python:3.12.11-slim-bookworm
RUN useradd --create-home --uid 1000 fed
COPY --from=build /opt/llm_fed /opt/llm_fed
ENV PATH=/opt/llm_fed/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["llm-fed"]
CMD ["--help"]
