"""Runs that merge the results of other runs: POTARA, Fisher merging, a mean, a grid."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import every
import pytest
import torch
from tiny import product

from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.experiment import finish, merging, run
from llm_fed.experiment.simulation import Simulation
from llm_fed.export import peft_folders
from llm_fed.kinds.language import load_base
from llm_fed.merge.mean import WEIGHTS, mix_factors
from llm_fed.mergers import potara
from llm_fed.methods import MERGERS, METHODS
from llm_fed.models.lora import Lora
from llm_fed.runs import tracking
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile
from llm_fed.settings.config import BaseConfig
from llm_fed.state import State


@pytest.fixture(scope="module")
def parents(small, tmp_path_factory) -> dict[str, Path]:
    """A FedIT and a local run, whose checkpoints of every round are kept."""
    folder = tmp_path_factory.mktemp("parents")
    found = {name: folder / name for name in ("fedit", "local")}
    for name, path in found.items():
        run.train(config_of(small, folder / "c.yaml", name), path)
    return found


def config_of(small, path: Path, name: str, **settings: Any) -> Any:
    changes = {"local": {"steps": 4}, "checkpoint": {"keep_rounds": [1, 2, 3]}, "eval": {"max_new_tokens": 2}}
    return configfile.load(small.config(path, method={"name": name, **settings}, **changes))


def merged(small, tmp_path: Path, parents: dict[str, Path], name: str, out: str = "out", **settings: Any) -> Path:
    run.train(config_of(small, tmp_path / "c.yaml", name, **settings), tmp_path / out, mode=Simulation(parents))
    return tmp_path / out


def states(small, folder: Path, structure: Lora | None = None) -> dict[str, State]:
    paths = sorted(folder.glob("adapters/*"))
    return {path.name: peft_folders.read(path, base_of(str(small.base)), structure)[0] for path in paths}


@cache
def base_of(folder: str) -> Any:
    return load_base(BaseConfig(name=folder, dtype="float32"), "cpu")


@pytest.fixture(scope="module")
def of_parents(small, parents) -> dict[str, dict[str, State]]:
    return {name: states(small, folder) for name, folder in parents.items()}


def merge_of(
    small, folder: Path, name: str, parents: dict[str, dict[str, State]], per_pass: int | None = None, **settings: Any
) -> Any:
    """What is prepared for a run of a merger, after the merge: what a run then exports and reports."""
    prepared = build.prepare(config_of(small, folder / "c.yaml", name, **settings), tracking.Reporter())
    if per_pass:
        prepared.runtime.clients_per_pass = per_pass
    merging.merge(prepared, parents)
    return prepared


def recipes_of(prepared: Any) -> dict[str, dict[str, Any]]:
    return {client: prepared.method.recipe(site) for client, site in prepared.clients.items()}


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    return {line["client"]: line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "merge"}


def files(folder: Path) -> dict[str, bytes]:
    """What must be equal between equal runs."""
    return {
        path.name: path.read_bytes() for path in (folder / "metrics.jsonl", *folder.glob("adapters/*/*.safetensors"))
    } | {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("adapters/*/*")}


def test_a_run_of_potara(small, parents, tmp_path):
    """Every client's adapter is its two parents' mixture with the weight that is logged, and stands in the card."""
    out = merged(small, tmp_path, parents, "potara", samples=4, grid=True)
    fed, local, found = (states(small, folder) for folder in (parents["fedit"], parents["local"], out))
    for client, recipe in recipes(out).items():
        assert 0 < recipe["lambda_fed"] < 1 and recipe["samples"] == 4
        a, b, c = (recipe[key] for key in "abc")
        assert recipe["lambda_fed"] == pytest.approx((b - c) / (a + b - 2 * c), rel=1e-4)
        assert recipe["sweep"]["0.001"] == recipe["lambda_fed"] and len(recipe["sweep"]) == 5
        assert list(recipe["grid"]) == [str(weight) for weight in WEIGHTS]
        expected = mix_factors(fed[client], local[client], recipe["lambda_fed"])
        torch.testing.assert_close(found[client].row, expected.row, rtol=0, atol=1e-5)
        assert f"lambda_fed: {recipe['lambda_fed']}" in (out / "adapters" / client / "README.md").read_text()
    assert len({recipe["lambda_fed"] for recipe in recipes(out).values()}) == len(recipes(out))
    summary = json.loads((out / "summary.json").read_text())
    rounds = {name: json.loads((folder / "summary.json").read_text())["round"] for name, folder in parents.items()}
    assert summary["needs"] == rounds and summary["scores"]["split"] == "test"
    report = (out / "report.html").read_text()
    assert f"Merged from fedit (round {rounds['fedit']}) and local (round {rounds['local']})" in report
    assert "Score by merging weight" in report and "Weight of fed, by damping" in report


def test_the_ends_of_the_weight_are_the_parents(small, parents, of_parents, tmp_path):
    """Scores too: the curve's ends are what the parents score on validation."""
    for weight, parent in ((1.0, "fedit"), (0.0, "local")):
        sites = merge_of(small, tmp_path, "mean", of_parents, weight=weight).clients
        assert all(sites[client].memory["merged"].equal(state) for client, state in of_parents[parent].items())
    grid = recipes_of(merge_of(small, tmp_path, "grid", of_parents))
    for weight, parent in (("1.0", "fedit"), ("0.0", "local")):
        lines = read_records(parents[parent] / "metrics.jsonl")
        chosen = json.loads((parents[parent] / "summary.json").read_text())["round"]
        (line,) = (x for x in lines if x["kind"] == "score" and x["split"] == "validation" and x["round"] == chosen)
        assert {client: recipe["grid"][weight] for client, recipe in grid.items()} == pytest.approx(line["clients"])


def test_delta_is_exported_with_twice_the_rank(small, parents, of_parents, tmp_path):
    out = merged(small, tmp_path, parents, "mean", weight=0.25, space="delta")
    fed, local, found = (states(small, folder) for folder in (parents["fedit"], parents["local"], out))
    settings = json.loads((out / "adapters" / "ada" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 16)
    layers = {name.rpartition(".")[0] for name in found["ada"]}
    for layer in layers:
        expected = 0.25 * product(fed["ada"], layer) + 0.75 * product(local["ada"], layer)
        torch.testing.assert_close(product(found["ada"], layer), expected, rtol=0, atol=1e-6)
    one, other = (
        recipes_of(merge_of(small, tmp_path, "potara", of_parents, space=space)) for space in ("delta", "factors")
    )
    for client, recipe in one.items():  # estimated from the factors in both
        assert recipe["lambda_fed"] == other[client]["lambda_fed"]


def test_other_ways_to_the_weight(small, parents, of_parents, tmp_path):
    """Drawn labels, held-out examples and a weight per factor change the weights; A and B then have their own."""
    plain = recipes_of(merge_of(small, tmp_path, "potara", of_parents))
    for settings in ({"fisher": "sampled"}, {"fisher_data": "held-out"}):
        other = recipes_of(merge_of(small, tmp_path, "potara", of_parents, **settings))
        assert all(other[client]["lambda_fed"] != recipe["lambda_fed"] for client, recipe in plain.items())
    out = merged(small, tmp_path, parents, "potara", "factors", per_factor=True)
    fed, local, found = (states(small, folder) for folder in (parents["fedit"], parents["local"], out))
    for client, recipe in recipes(out).items():
        weights = recipe["lambda_fed"]
        assert weights["lora_A"] != weights["lora_B"] and set(recipe["sweep"]) == {"lora_A", "lora_B"}
        expected = mix_factors(fed[client], local[client], weights)
        torch.testing.assert_close(found[client].row, expected.row, rtol=0, atol=1e-5)


def test_a_chosen_round_is_that_of_the_checkpoint(small, parents, tmp_path):
    """FedIT's state of round 1 lies in its checkpoint as it is; local adapters of round 2 in the clients' memories."""
    out = merged(small, tmp_path, parents, "mean", weight=1.0, fed_round=1)
    server = Checkpoints(parents["fedit"] / "checkpoints").load(1).state["state"]
    assert all(state.equal(server) for state in states(small, out).values())
    out = merged(small, tmp_path, parents, "mean", "second", weight=0.0, local_round=2)
    saved = Checkpoints(parents["local"] / "checkpoints").load(2)
    for client, state in states(small, out).items():
        assert state.equal(saved.memory(f"memory/{client}")["adapter"])
    assert recipes(out)["ada"]["rounds"]["local"] == 2


def test_a_round_without_a_checkpoint_is_refused_before_anything_is_trained(small, tmp_path):
    config = configfile.load(small.config(tmp_path / "c.yaml", method={"name": "potara", "fed_round": 2}))
    with pytest.raises(UserError, match=r"checkpoint\.keep_rounds=\[2\]"):
        run.train(config, tmp_path / "out")
    beyond = replace(config, method={"name": "potara", "local_round": 9})
    with pytest.raises(UserError, match="rounds to at least 9"):
        run.train(beyond, tmp_path / "beyond")
    assert not (tmp_path / "out" / "needs").exists()


def test_an_overfitted_local_adapter_is_noted(small, parents, of_parents, tmp_path, monkeypatch, capsys):
    """With the threshold raised above the losses here, which are those of the local run."""
    monkeypatch.setattr(potara, "OVERFITTED", 10.0)
    found = recipes(merged(small, tmp_path, parents, "potara"))["ada"]
    assert 0 < found["losses"][1] < found["losses"][0] and "memorised them" in found["note"]
    assert "ada: the local adapter's loss on the 6 examples" in capsys.readouterr().err
    assert "fisher_data=held-out and method.grid=true" in found["note"]
    sampled = recipes_of(merge_of(small, tmp_path, "potara", of_parents, fisher="sampled"))["ada"]
    held = recipes_of(merge_of(small, tmp_path, "potara", of_parents, fisher_data="held-out"))["ada"]
    assert "note" not in sampled
    assert "is sure of them" in held["note"] and held["note"].endswith("; try method.grid=true")


# The battery of mergers (that of methods with rounds is test_battery.py).


@pytest.fixture(scope="module", params=MERGERS)
def whole(request, small, of_parents, tmp_path_factory) -> tuple[str, Any]:
    return request.param, merge_of(small, tmp_path_factory.mktemp(request.param), request.param, of_parents)


def test_the_same_seed_gives_the_same_merge(whole, small, of_parents, tmp_path):
    name, prepared = whole
    again = merge_of(small, tmp_path, name, of_parents)
    for client, site in prepared.clients.items():
        assert again.clients[client].memory["merged"].equal(site.memory["merged"])
        assert again.method.recipe(again.clients[client]) == prepared.method.recipe(site)


@pytest.mark.parametrize("name", every.quick(MERGERS, ["ties"]))
def test_a_run_exports_what_was_merged(small, parents, of_parents, tmp_path, name):
    out = merged(small, tmp_path, parents, name)
    for client, site in merge_of(small, tmp_path, name, of_parents).clients.items():
        expected = site.memory["merged"]
        torch.testing.assert_close(states(small, out, site.structure)[client].row, expected.row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("per_pass", every.quick([1, 2], [2]))
def test_fused_is_one_by_one(whole, small, of_parents, tmp_path, per_pass):
    name, prepared = whole
    for client, site in merge_of(small, tmp_path, name, of_parents, per_pass).clients.items():
        found, expected = site.memory["merged"], prepared.clients[client].memory["merged"]
        torch.testing.assert_close(found.row, expected.row, rtol=0, atol=1e-5)
        assert found.layout == expected.layout


def test_personalize_only_computes(whole):
    _, prepared = whole
    before = {client: dict(site.memory) for client, site in prepared.clients.items()}
    for _ in range(2):
        found = prepared.runtime.run(
            {client: prepared.method.personalize(site, None) for client, site in prepared.clients.items()}
        )
        assert all(found[client].layout == site.initial().layout for client, site in prepared.clients.items())
    assert {client: dict(site.memory) for client, site in prepared.clients.items()} == before


@pytest.fixture(scope="module")
def uninterrupted(small, parents, tmp_path_factory) -> dict[str, bytes]:
    return files(merged(small, tmp_path_factory.mktemp("uninterrupted"), parents, "potara"))


class Killed(BaseException):
    """Nothing in the project catches this."""


@pytest.mark.parametrize("stage", every.quick(["fedit", "local", "merge", "deliver"], ["local", "deliver"]))
def test_continued_is_uninterrupted(small, uninterrupted, tmp_path, monkeypatch, stage):
    """Killed within the first parent, within the second, before the merge, and while its adapters are written."""
    config = config_of(small, tmp_path / "c.yaml", "potara")
    real = {"card": finish.model_card, "federate": run.federate, "merge": merging.merge}
    calls: list[str] = []

    def federate(federation, *rest: Any, **options: Any) -> Any:
        name = "local" if type(federation.method) is METHODS["local"] else "fedit"
        calls.append(name)
        if name == stage:
            raise Killed
        return real["federate"](federation, *rest, **options)

    def card(model: Any, *, client: str, method: str, **rest: Any) -> str:
        if (stage, method, client) == ("deliver", "potara", "bob"):
            raise Killed
        return real["card"](model, client=client, method=method, **rest)

    def merge(experiment: Any, *given: Any) -> Any:
        if stage == "merge":
            raise Killed
        return real["merge"](experiment, *given)

    with monkeypatch.context() as patched:
        patched.setattr(run, "federate", federate)
        patched.setattr(merging, "merge", merge)
        patched.setattr(finish, "model_card", card)
        with pytest.raises(Killed):
            run.train(config, tmp_path / "out")
    assert not (tmp_path / "out" / "summary.json").exists()
    begun = set(calls)
    with monkeypatch.context() as patched:
        patched.setattr(run, "federate", lambda *a, **k: calls.append("again") or real["federate"](*a, **k))
        run.train(config, tmp_path / "out")
    assert begun == ({"fedit"} if stage == "fedit" else {"fedit", "local"})
    assert calls.count("again") == {"fedit": 2, "local": 1}.get(stage, 0)  # finished runs are not run again
    assert files(tmp_path / "out") == uninterrupted
