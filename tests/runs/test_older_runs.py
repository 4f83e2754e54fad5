"""Runs that version 0.3.0 wrote are read, checked and continued.

tests/support/run_0.3.0 was made by that version on the tiny base that llm_fed ships: `whole` is finished, and the
process of `cut` ended after its second of three rounds. Reports, lock files and the checksums of config.yaml were left
out, the latter since paths were made relative.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import llm_fed as library
from llm_fed.experiment import environment

REPOSITORY = Path(__file__).parents[2]
ADAPTER = "adapters/{}/adapter_model.safetensors"


@pytest.fixture
def old(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder in which the runs were made; one thread, as they had."""
    shutil.copytree(REPOSITORY / "tests/support/run_0.3.0", tmp_path, dirs_exist_ok=True)
    shutil.copytree(REPOSITORY / "llm_fed/assets/tiny-base", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def test_a_finished_run_is_scored_checked_exported_and_chatted_with(llm_fed, old):
    recorded = json.loads((old / "whole/summary.json").read_text())["scores"]
    said = llm_fed("eval", "whole", "--json")
    assert said.code == 0, said.err
    scores = json.loads(said.out)
    assert scores["clients"] == recorded["clients"]
    assert scores["losses"] == pytest.approx(recorded["losses"], abs=1e-3)

    said = llm_fed("audit", "whole", "--sample", 0)
    assert said.code == 0 and "nothing differs" in said.out + said.err, said.err

    said = llm_fed("export", "whole", "out", "--client", "north")
    assert said.code == 0, said.err
    exported, theirs = load_file("out/north/adapter_model.safetensors"), load_file("whole/" + ADAPTER.format("north"))
    assert exported.keys() == theirs.keys() and all(torch.equal(exported[key], theirs[key]) for key in theirs)

    run = library.open_run("whole")
    assert run.scores == recorded["clients"] and isinstance(run.chat("south", "what of red 0?"), str)


def test_a_run_that_was_cut_off_ends_where_the_whole_one_did(llm_fed, old, monkeypatch):
    versions = {name: "0.4.0" for name in environment.LIBRARIES}
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions.get(name, "1"))
    said = llm_fed("run", "clinics.yaml", "--out", "cut")
    assert said.code == 0, said.err
    assert "round 3/3" in said.err and "round 2/3" not in said.err
    for client in ("north", "south"):
        ours, theirs = load_file("cut/" + ADAPTER.format(client)), load_file("whole/" + ADAPTER.format(client))
        assert all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in theirs)
    recorded = json.dumps(json.loads(Path("cut/environment.json").read_text()))
    assert "0.3.0" in recorded and "0.4.0" in recorded
