"""`llm-fed audit`: clean runs give no finding, injected faults are found, and the chain survives a resume."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from llm_fed.runs import digests


@pytest.fixture(scope="module")
def faults() -> Any:
    """scripts/analysis/audit_faults.py"""
    import importlib
    import sys

    folder = str(Path(__file__).parents[2] / "scripts" / "analysis")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [folder, *sys.path])
        yield importlib.import_module("audit_faults")


@pytest.fixture(scope="module")
def runs(faults, tmp_path_factory) -> dict[str, tuple[Any, Path]]:
    """Configuration and folder of a clean run of each family, made when it is asked for; not to be changed."""
    place = tmp_path_factory.mktemp("runs")

    class Made(dict[str, tuple[Any, Path]]):
        def __missing__(self, family: str) -> tuple[Any, Path]:
            config = faults.configured(family, place / "data")
            self[family] = config, faults.train(family, config, place / family)
            return self[family]

    return Made()


@pytest.mark.parametrize(
    "family",
    [
        "fedmerge",
        "feddle, late answers",
        "image model",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedit", "local", "scaffold", "half of the clients")),
    ],
)
def test_a_clean_run_gives_no_finding(faults, runs, family):
    config, folder = runs[family]
    found = faults.audited(folder, config)
    assert (found.findings, found.unchecked) == ([], [])
    rounds = ", ".join(str(round + 1) for round in range(config.rounds))
    assert f"rounds {rounds}, trained again" in found.checked


def test_a_resumed_run_has_the_same_digests_and_no_finding(faults, runs):
    (_, whole), (config, resumed) = runs["fedit"], runs["resumed"]
    assert (resumed / digests.FILE).read_bytes() == (whole / digests.FILE).read_bytes()
    assert not faults.audited(resumed, config).findings


@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 20))])
def test_an_injected_fault_is_found_and_named(faults, runs, tmp_path, number):
    kind, family = faults.KINDS[number % 6], ("fedit", "fedmerge", "image model", "scaffold")[number % 4]
    config, clean = runs[family]
    draw, fault = random.Random(number), None
    while fault is None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        fault = faults.inject(kind, family, config, clean, tmp_path / "run", draw)
    found = faults.audited(tmp_path / "run", config)
    assert fault.named(found), (kind, family, fault, found.findings)


def test_one_clients_fault_is_no_finding_about_another(faults, runs, tmp_path):
    """Nor are the rounds that follow from it: they cannot be made again, which is said."""
    config, clean = runs["fedit"]
    fault = faults.inject("stale message", "fedit", config, clean, tmp_path / "run", random.Random(1))
    found = faults.audited(tmp_path / "run", config)
    assert {(item.round, item.client) for item in found.findings} == {(fault.round, fault.client)}
    assert any("the server's step of round" in line for line in found.unchecked)


def test_a_line_of_the_chain_cannot_be_changed_alone(faults, runs, tmp_path):
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    lines = (folder / digests.FILE).read_text().splitlines()
    line = json.loads(lines[2])
    line["uploads"]["ada"] = line["uploads"]["bob"]
    (folder / digests.FILE).write_text("\n".join([*lines[:2], json.dumps(line), *lines[3:], ""]))
    kinds = {(item.round, item.client, item.kind) for item in faults.audited(folder, config).findings}
    assert {(2, "", "chain"), (2, "ada", "client pass")} <= kinds


def test_elsewhere_nothing_is_trained_again(faults, runs, tmp_path):
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    path = folder / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    found = faults.audited(folder, config)
    assert not found.findings and "another environment" in found.unchecked[0] and "torch 1.0" in found.unchecked[0]
    assert not any("trained again" in line for line in found.checked)


def test_the_command(llm_fed, finished, tmp_path):
    said = llm_fed("audit", finished, "--rounds", "2")
    assert said.code == 0 and "rounds 1, 2, trained again" in said.out and said.out.endswith("nothing differs\n")
    folder = shutil.copytree(finished, tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"steps": 8', '"steps": 9', 1))
    said = llm_fed("audit", folder, "--sample", 0, "--json")
    (finding,) = json.loads(said.out)["findings"]
    assert said.code == 1 and (finding["round"], finding["kind"]) == (1, "chain")
    llm_fed("audit", finished, "--rounds", "9").assert_refused("--rounds 9", "digests of rounds 1 to 3")
    llm_fed("audit", finished, "--rounds", "9", "--all").assert_refused("one of --rounds, --sample and --all")
    llm_fed("audit", finished, "--rounds", "x").assert_refused("--rounds x is no list of rounds")
    (folder / digests.FILE).unlink()
    llm_fed("audit", folder).assert_refused("has no digests.jsonl", "earlier version")
