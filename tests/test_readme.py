"""The first page: short enough to be read, its links lead somewhere, and its method is what it says."""

import io
import json
import re
import shlex
from pathlib import Path

import outside
import yaml

from llm_fed.commands.quickstart import ASSETS
from llm_fed.testing.federation import ADAPTERS, go

README = (outside.ROOT / "README.md").read_text()


def test_it_is_short():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_its_method_is_federated_averaging(tmp_path, here):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class " in block)
    outside.module(here, "printed", outside.IMPORTS + code)
    found, expected = (
        go({"name": name}, ADAPTERS, tmp_path / name.partition(":")[0]) for name in ("printed:FedAvg", "fedavg")
    )
    assert found.state.equal(expected.state) and found.losses() == expected.losses()


def test_its_first_ten_minutes(tmp_path, monkeypatch, llm_fed):
    """A folder with a file per client, `init`, `run` and `chat` as printed, and the lines of Python, on a tiny base."""
    monkeypatch.chdir(tmp_path)
    row = json.loads(re.findall(r"```json\n(.*?)```", README, re.DOTALL)[0])
    for client in ("north", "south"):
        rows = [{**row, "question": f"{row['question']} {number}"} for number in range(20)]
        (tmp_path / "clinics").mkdir(exist_ok=True)
        (tmp_path / f"clinics/{client}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (commands,) = (block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "llm-fed init" in block)
    for command, *words in (shlex.split(line, comments=True) for line in commands.splitlines()):
        assert command == "llm-fed"
        words = [str(ASSETS / "tiny-base") if word.startswith("Qwen/") else word for word in words]
        monkeypatch.setattr("sys.stdin", io.StringIO("/base\n/client south\n"))
        said = llm_fed(*words)
        assert said.code == 0, said.err
        if words[0] == "init":  # shorter than one would train
            tree = yaml.safe_load(Path("clinics.yaml").read_text())
            tree |= {"rounds": 1, "local": {"steps": 1, "lr": 1e-3}, "eval": {"max_new_tokens": 2}}
            Path("clinics.yaml").write_text(yaml.safe_dump(tree))
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import llm_fed" in block)
    code = code.replace('{"rounds": 9}', '{"rounds": 1, "local": {"steps": 1}, "eval": {"max_new_tokens": 2}}')
    code = code.replace("Qwen/Qwen3-0.6B", str(ASSETS / "tiny-base"))
    exec(compile(code, "README.md", "exec"), {})
