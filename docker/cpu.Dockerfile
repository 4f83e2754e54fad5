# llm_fed on a CPU, in a clone:
#   docker build -f docker/cpu.Dockerfile -t llm-fed:cpu .
#   docker run --rm -v "$PWD:/work" llm-fed:cpu run clinics.yaml
# The user in it has the id 1000; `--user "$(id -u)"` with `-e HOME=/tmp` takes yours, where that is another.
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY llm_fed llm_fed
COPY tasks tasks
COPY eval eval
COPY scripts scripts
# torch first, from the index whose wheels have no CUDA libraries in them
RUN python -m venv /opt/llm_fed \
    && /opt/llm_fed/bin/pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && /opt/llm_fed/bin/pip install --no-cache-dir .

FROM python:3.12.11-slim-bookworm
RUN useradd --create-home --uid 1000 fed
COPY --from=build /opt/llm_fed /opt/llm_fed
ENV PATH=/opt/llm_fed/bin:$PATH
USER 1000
WORKDIR /work
ENTRYPOINT ["llm-fed"]
CMD ["--help"]
