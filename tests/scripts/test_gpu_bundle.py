"""scripts/gpu/bundle.sh: what a bundle holds, and that it runs on a machine that has little."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu_scripts import GPU, ROOT, bare, bash, made, modules, stub

STEPS = ("equality", "families", "training", "generation", "start", "evidence", "large")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "out"
    done = made(out, "--code-only")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> None:
    """Packages can be downloaded."""
    words = ["download", "--quiet", "--no-deps", "--retries", "0", "--dest", str(tmp_path_factory.mktemp("index"))]
    if subprocess.run([sys.executable, "-m", "pip", *words, "iniconfig"], capture_output=True).returncode:
        pytest.skip("no index of packages can be reached")


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_bundle_holds_the_code_of_a_commit(bundle):
    assert size(bundle) < 60 * 2**20
    assert {path.name for path in bundle.iterdir()} == {"run.sh", "commit", "code", "package", "wheels"}
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    assert head.startswith((bundle / "commit").read_text().strip())
    for name in ("tasks/__init__.py", "eval/plots.py", "assets/tiny-base/config.json", "scripts/runs/flan.yaml"):
        assert (bundle / "package/llm_fed" / name).is_file()
    again = bash(GPU / "bundle.sh", bundle, "--code-only")
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_a_relative_folder_is_where_one_is_and_not_where_tests_start(bundle, tmp_path):
    """`equality` starts pytest in the code's folder, with the same path of modules."""
    python = stub(tmp_path / "python", f'echo "$PYTHONPATH" >> {tmp_path}/paths')
    done = bash(bundle / "run.sh", "--tiny", "large", cwd=tmp_path, OUT="results", PYTHON=python)
    assert done.returncode == 0 and (tmp_path / "results/logs/large.log").exists()
    paths = (tmp_path / "paths").read_text().splitlines()[-1].split(":")
    assert str(tmp_path / "results/site") in paths and all(path.startswith("/") for path in paths if path)


@pytest.mark.parametrize(("built", "code"), [("a-1-py3-none-any.whl", 0), ("a-1-cp311-cp311-linux_x86_64.whl", 1)])
def test_a_package_of_sources_is_carried_if_any_python_can_use_it(tmp_path, built, code):
    body = f"""
    for last; do case "$before" in --dest | --wheel-dir) into=$last ;; esac; before=$last; done
    case "$*" in *packages.py\\ car*) echo a==1 ;; *" download "*) : > $into/a-1.tar.gz ;; *) : > $into/{built} ;; esac
    """
    done = made(tmp_path / "out", "--python", "3.12", PYTHON=stub(tmp_path / "python", body))
    assert done.returncode == code and (code == 0) == ("no wheel for Python 3.12" not in done.stderr), done.stderr
    assert [path.name for path in (tmp_path / "out/wheels").iterdir()] == ([] if code else [built])


def test_what_is_carried(monkeypatch):
    """What conftest.py imports, and kernels that the extra `gpu` names; `--newer` brings transformers."""
    carried = modules(monkeypatch, "packages")["packages"]
    usual, newer = carried.carried(), carried.carried(newer=True)
    names = {re.split("[=<>]", each)[0] for each in usual}
    assert {"bitsandbytes", "hypothesis", "liger-kernel", "matplotlib", "omegaconf", "pytest"} <= names
    assert not names & {"torch", "transformers", "peft", "accelerate", "numpy", "pyarrow", "llm-fed"}
    more = {re.split("[=<>]", each)[0] for each in newer}
    assert names <= more and {"transformers", "tokenizers", "huggingface-hub"} <= more
    assert not more & {"torch", "peft", "accelerate", "numpy"}


def test_wheels_are_lightened_but_for_what_is_needed(monkeypatch, tmp_path):
    packages = modules(monkeypatch, "packages")["packages"]
    kept = {"a/libbitsandbytes_cpu.so", "a/libbitsandbytes_cuda130.so", "a/code.py", "fontTools/agl.py", "a/more.so"}
    left = {"a/libbitsandbytes_cuda128.so", "a/tests/data.bin", "a/code.c", "fontTools/misc/bezier.so"}
    for name, lines in (("large", packages.LARGE), ("small", 1)):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            for file in kept | left:
                wheel.writestr(file, b"x" * lines)
    monkeypatch.setattr(sys, "argv", ["packages.py", "lighten", str(tmp_path), "--cuda", "130"])
    packages.main()
    assert set(zipfile.ZipFile(tmp_path / "large.whl").namelist()) == kept
    assert set(zipfile.ZipFile(tmp_path / "small.whl").namelist()) == kept | left


@pytest.mark.slow
@pytest.mark.parametrize("newer", [False, True], ids=["", "newer"])
def test_a_bundle_for_another_python_and_a_version_of_cuda(index, tmp_path, newer):
    out = tmp_path / "out"
    done = made(out, "--python", "3.12", "--cuda", "130", *(["--newer"] if newer else []))
    assert done.returncode == 0 and ": more than" not in done.stderr, done.stderr
    assert size(out) < 60 * 2**20
    wheels = {path.name.split("-")[0]: path for path in (out / "wheels").glob("*.whl")}
    assert "-cp312-" in wheels["matplotlib"].name and not any("-cp311-cp311-" in path.name for path in wheels.values())
    names = "\n".join(zipfile.ZipFile(wheels["bitsandbytes"]).namelist())
    assert set(re.findall(r"libbitsandbytes_(\w+)\.so", names)) == {"cpu", "cuda130"}
    assert "liger_kernel" in wheels and ("transformers" in wheels) == newer


@pytest.fixture(scope="module")
def machine(index, tmp_path_factory) -> tuple[Path, Path]:
    """An unpacked bundle, and a Python with little else than torch."""
    folder = tmp_path_factory.mktemp("machine")
    done = made(folder / "out")
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        python = bare(folder / "bare", modules(patch, "packages")["packages"])
    assert subprocess.run([python, "-c", "import pytest"], capture_output=True).returncode
    return folder / "out", python


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_a_bundle_runs_where_there_is_little_else_than_torch(machine, monkeypatch, tmp_path, step):
    """All its cases, from another folder and with a relative folder for results; the base of `start` is the package's
    own, and the evidence is skipped."""
    (out, python), scripts = machine, modules(monkeypatch, "steps", "lines")
    assert tuple(scripts["steps"].STEPS) == STEPS
    done = bash(out / "run.sh", "--tiny", step, cwd=tmp_path, OUT="results", PYTHON=python, LIMIT=600)
    log = (tmp_path / f"results/logs/{step}.log").read_text()[-2000:]
    said = "skipped, " if step == "evidence" else f"{step}: done\n"
    assert done.returncode == 0 and said in done.stdout, (done.stdout, done.stderr, log)
    lines = [line for line in scripts["lines"].read(tmp_path / "results/results.jsonl") if line.is_measured]
    cases = () if step == "evidence" else scripts["steps"].STEPS[step].cases
    assert [(line.step, line.case) for line in lines] == [(step, case) for case in cases]
    assert all(line.commit == (out / "commit").read_text().strip() for line in lines)
