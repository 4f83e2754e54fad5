"""What `llm-fed merge` makes of runs is scored, compared, exported and chatted with like a run."""

import io
import json
from pathlib import Path

import pytest

from llm_fed.experiment import run as experiment
from llm_fed.settings import configfile


@pytest.fixture(scope="module")
def merged(small, tmp_path_factory) -> Path:
    """A folder with a run of FedIT, one of local training, and their merge of double rank."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fedit", "local"):
        config = small.config(folder / "c.yaml", method={"name": name})
        experiment.train(configfile.load(config), folder / name)
    return folder


@pytest.fixture
def output(merged, llm_fed) -> Path:
    out = merged / "merged"
    if not out.exists():
        said = llm_fed("merge", "task-arithmetic", "--json", *parents(merged), "--out", out)
        assert said.code == 0, said.err
        assert json.loads(said.out)["scores"]["clients"].keys() == {"ada", "bob", "cyd"}
    return out


def parents(merged: Path) -> tuple[object, ...]:
    return "--fed", merged / "fedit", "--local", merged / "local"


def test_it_is_scored_and_compared(merged, output, llm_fed):
    done = json.loads((output / "summary.json").read_text())["scores"]
    said = llm_fed("eval", output, "--json")
    assert said.code == 0 and json.loads(said.out)["clients"] == done["clients"], said.err
    assert json.loads(said.out)["losses"] == done["losses"]
    assert llm_fed("eval", output, "--cross").code == 0
    assert llm_fed("report", output).code == 0
    page = (output / "report.html").read_text()
    assert "Merged from fedit (round 3) and local (round 3)" in page
    said = llm_fed("compare", "--runs", output, merged / "fedit")
    assert said.code == 0 and "task-arithmetic" in said.out + said.err, said


def test_it_is_chatted_with_and_exported(output, tmp_path, llm_fed, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n"))
    assert llm_fed("chat", output, "--client", "bob").code == 0
    assert llm_fed("export", output, tmp_path / "copies").code == 0
    assert {path.name for path in (tmp_path / "copies").iterdir()} == {"ada", "bob", "cyd"}


def test_a_run_is_not_written_over(merged, llm_fed):
    before = (merged / "fedit/config.yaml").read_bytes()
    refused = llm_fed("merge", "mean", *parents(merged), "--out", merged / "fedit")
    refused.assert_refused("is the folder of a run, whose files the merge would replace")
    assert (merged / "fedit/config.yaml").read_bytes() == before


def test_what_no_run_took_part_in_leaves_no_old_scores(merged, tmp_path, llm_fed):
    out, names = tmp_path / "out", (merged / "fedit/adapters/ada", merged / "local/adapters/ada")
    assert llm_fed("merge", "mean", *parents(merged), "--out", out).code == 0 and (out / "summary.json").exists()
    assert llm_fed("merge", "mean", "--fed", names[0], "--local", names[1], "--out", out).code == 0
    assert not (out / "summary.json").exists() and not (out / "config.yaml").exists()
