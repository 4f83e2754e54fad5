"""Whole runs of adapters on a vision transformer: every method, what it exports, and whose the head is."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import every
import peft
import pytest
import tiny_images
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification

from llm_fed import load_client, methods
from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.commands.evaluate import evaluate_adapter, evaluate_run
from llm_fed.commands.merge import merge_adapters
from llm_fed.experiment import announce
from llm_fed.experiment import run as experiment
from llm_fed.experiment.simulation import Simulation
from llm_fed.export import models, peft_folders
from llm_fed.models.lora import ANCHORS, SCALE
from llm_fed.runs.reading import saved_config
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

ROUTED = tiny_images.LORA.with_experts("one", "two", gate="router")
METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedit": {},
    "fedit with heads of their own": {"private_head": True},
    "fedlora": {},
    "ffa": {},
    "rolora": {},
    "fedrot-lora": {},
    "fedsvd": {},
    "fedsa": {},
    "feddpa": {"anchors": 2},
    "feddpa f": {"variant": "f", "anchors": 2},
    "fedalt": {},
    "hetlora": {},
    "flexlora": {},
    "flora": {},
    "fedex-lora": {},
    "pfedmoe": {},
    "fedem": {"num_models": 2},
    "ifca": {"num_models": 2, "warmup_rounds": 1},
    "fedmerge": {"num_models": 2},
    "fedmerge-fixed": {"num_models": 2, "models_per_client": 1},
    "feddle": {"search_lr": 0.05},
    "feddf": {"server_lr": 0.01},
    "potara": {"samples": 4, "grid": True},
    "potara per factor": {"samples": 4, "per_factor": True, "fisher": "sampled"},
    "potara delta": {"samples": 4, "space": "delta"},
    "potara traced": {"samples": 4, "head": "traced", "per_factor": True},
    "potara with own heads": {"samples": 4, "head": "own", "space": "delta", "grid": True},
    "fisher-merging": {"samples": 4},
    "fisher-merging of heads by mean": {"samples": 4, "head": "mean"},
    "mean": {"space": "delta"},
    "grid": {},
    "task-arithmetic": {},
    "ties": {},
    "dare": {},
    "slerp": {},
}
# One of each form of what is trained, kept and exported: the others are as one of these, and `make long` runs them.
QUICK = {
    "fedit with heads of their own", "feddpa f", "flora", "pfedmoe", "potara with own heads",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("image-adapters")
    tiny_images.npz(folder / "own.npz", train=40, test=12)
    tiny_images.save(tiny_images.vit(torch.float32), folder / "vit")
    return folder


def configured(files: Path, name: str, **changes: Any) -> dict[str, Any]:
    server = {"examples": 6} if name in ("feddle", "feddf") else {}
    method = {"name": name.split()[0], **METHODS[name]}
    rounds = 2 if methods.build(method).together(2) == 2 else 4  # then the clients train half of them together
    return tiny_images.tree(
        files / "own.npz",
        base={"name": str(files / "vit")},
        adapter={"rank": 2, "alpha": 4, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
        method=method,
        local={"epochs": 2, "lr": 0.03, "lr_end": 0.03},
        task={"server": server},
        eval={"every": 0, **({"cross": "auto", "base": True} if name == "local" else {})},
        **{"rounds": rounds, **changes},
    )


@pytest.fixture(scope="module")
def parents(files, tmp_path_factory) -> Path:
    """A folder with a run of FedIT, one of local training, and one of POTARA that starts from both."""
    folder = tmp_path_factory.mktemp("parents")
    for name in ("fedit", "local", "potara"):
        needed = {need: folder / need for need in ("fedit", "local")}
        experiment.train(from_dict(configured(files, name)), folder / name, mode=Simulation(needed))
    return folder


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_every_method_of_adapters_runs_on_a_vision_transformer(files, parents, tmp_path, name):
    """It learns, or merges what has learned; what is exported, read back, scores the same."""
    run, config = tmp_path / "run", from_dict(configured(files, name))
    summary = experiment.train(config, run, mode=Simulation({need: parents / need for need in ("fedit", "local")}))
    assert evaluate_run(run)["scores"]["clients"] == summary["scores"]["clients"]
    merged = [line for line in read_records(run / "metrics.jsonl") if line["kind"] == "merge"]
    losses = [line["loss"] for line in read_records(run / "metrics.jsonl") if line["kind"] == "round"]
    assert bool(merged) != bool(losses)
    if losses:
        assert losses[-1] < losses[0] - 0.02
    events = [line for line in read_records(run / "metrics.jsonl") if line["kind"] == "event"]
    assert not events
    # What was written is what is read, and a head is in it.
    built = build.prepare(config, Reporter())
    for id, site in built.clients.items():
        one = models.read(run / "adapters" / id, site.structure, built.base)
        assert one.layout == built.base.layout(site.structure)
        start = site.initial()
        assert not torch.equal(one["classifier.weight"], start["classifier.weight"])
        models.write(tmp_path / "again" / id, one, site.structure, built.base, "card")
        again = models.read(tmp_path / "again" / id, site.structure, built.base)
        assert again.equal(one)
        where = "gate.safetensors" if not site.structure.plain else "adapter_model.safetensors"
        assert any(key.endswith("classifier.weight") for key in load_file(run / "adapters" / id / where))


@pytest.mark.parametrize(
    "name, shared",
    [
        ("fedit", True),
        ("fedit with heads of their own", False),
        ("fedsa", False),
        ("feddpa", True),
        ("fedem", True),
        ("pfedmoe", False),
        ("fedalt", False),
    ],
)
def test_whose_the_head_is(files, tmp_path, name, shared):
    """One for all clients, after the server's mean, or each client's own; routers are always the client's."""
    experiment.train(from_dict(configured(files, name, rounds=1)), tmp_path / "run")
    built = build.prepare(from_dict(configured(files, name)), Reporter())
    states = [
        models.read(tmp_path / "run/adapters" / id, site.structure, built.base) for id, site in built.clients.items()
    ]
    assert all(torch.equal(states[0]["classifier.bias"], one["classifier.bias"]) for one in states) == shared
    if name.startswith("fedit"):
        factors = [entry for entry in states[0] if ".lora_" in entry]
        assert factors and all(torch.equal(states[0][entry], states[1][entry]) for entry in factors)
    routers = [entry for entry in states[0] if entry.endswith(".router")]
    assert all(not torch.equal(states[0][entry], states[1][entry]) for entry in routers)


@pytest.mark.parametrize("name", every.quick(["potara", "fisher-merging", "mean", "grid"], ["mean"]))
def test_what_merges_can_start_from_heads_of_their_own(files, tmp_path, name):
    """FedIT's run is made with them; the local one has no such setting."""
    tree = configured(files, name, rounds=1)
    experiment.train(from_dict({**tree, "method": {**tree["method"], "private_head": True}}), tmp_path)
    assert saved_config(tmp_path / "needs/fedit")["method"] == {"name": "fedit", "private_head": True}
    assert saved_config(tmp_path / "needs/local")["method"] == {"name": "local"}
    one, other = (load_file(tmp_path / f"needs/fedit/adapters/client{k}/adapter_model.safetensors") for k in (0, 1))
    assert {key for key in one if not torch.equal(one[key], other[key])} == {key for key in one if "classifier" in key}


@pytest.mark.parametrize("head", every.quick(["mixed", "own", "traced"], ["own", "traced"]))
def test_the_head_in_potaras_traces(files, parents, tmp_path, head):
    """App. B speaks of A and B: the weight is that of their traces, unless the head is to count as well."""
    tree = configured(files, "potara")
    config = from_dict({**tree, "method": {**tree["method"], "head": head, "grid": False}})
    experiment.train(config, tmp_path, mode=Simulation({need: parents / need for need in ("fedit", "local")}))
    built = build.prepare(config, Reporter())
    recipes = {line["client"]: line for line in read_records(tmp_path / "metrics.jsonl") if line["kind"] == "merge"}
    for id, site in built.clients.items():
        fed, local, merged = (
            models.read(folder / "adapters" / id, site.structure, built.base)
            for folder in (parents / "fedit", parents / "local", tmp_path)
        )
        found = built.runtime.run({id: site.gradient_moments(fed, local, site.sample(4))})[id]
        kept = torch.cat([torch.full((fed[n].numel(),), head == "traced" or ".lora_" in n) for n in fed])
        f = found.fisher[:, kept]
        sigma = 1 / (f + 1e-3 * f.mean(1, keepdim=True))
        m = found.moments
        rho = (m.covariance / m.variance.prod(0).sqrt()).nan_to_num(0.0)[kept].clamp(0, 1)
        bound = (sigma[0] / sigma[1]).sqrt()
        c = float((torch.minimum(rho, torch.minimum(bound, 1 / bound)) * sigma.prod(0).sqrt()).sum())
        a, b = sigma.sum(1).tolist()
        weight = (b - c) / (a + b - 2 * c)
        assert recipes[id]["lambda_fed"] == pytest.approx(weight, rel=1e-4) and 0 < weight < 1
        own = 0.0 if head == "own" else weight
        for name, share in {next(n for n in fed if ".lora_" in n): weight, "classifier.weight": own}.items():
            torch.testing.assert_close(merged[name], share * fed[name] + (1 - share) * local[name], rtol=0, atol=1e-5)


def test_a_frozen_head_stays_as_it_was_drawn(files, tmp_path):
    """The same at all clients; the adapters are trained."""
    tree = configured(files, "local")
    config = from_dict({**tree, "local": {**tree["local"], "freeze": "^classifier"}})
    plan = announce.run_plan(build.prepare(config, Reporter()))
    whole = announce.run_plan(build.prepare(from_dict(tree), Reporter()))
    assert whole.parameters.most - plan.parameters.most == 100  # 24 features and a bias for each of four classes
    experiment.train(config, tmp_path / "run")
    built = build.prepare(config, Reporter())
    for id, site in built.clients.items():
        one, start = models.read(tmp_path / "run/adapters" / id, site.structure, built.base), site.initial()
        for name in one:
            assert torch.equal(one[name], start[name]) == name.startswith("classifier"), name
    for wrong, said in (("nothing", "^local.freeze='nothing' matches none of"), (".", "leaves nothing to train")):
        with pytest.raises(UserError, match=said):
            experiment.train(from_dict({**tree, "local": {**tree["local"], "freeze": wrong}}), tmp_path / said[-8:])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"adapter": None}, "fedit trains, sends or merges parts of LoRA adapters, but adapter is null"),
        ({"task": {"server": {"examples": 6, "test": True}}}, "gives each client a personal one"),
        ({"method": {"name": "hfcl", "private_head": True}}, "private_head is a setting of fedit, .*; hfcl takes"),
    ],
)
def test_heads_of_their_own_do_not_go_with_everything(files, changes, said):
    tree = configured(files, "fedit with heads of their own")
    with pytest.raises(UserError, match=said):
        build.prepare(from_dict({**tree, **changes, "task": {**tree["task"], **changes.get("task", {})}}), Reporter())


def test_experts_are_loaded_for_use(files, tmp_path):
    """Every expert is a PEFT folder; the gate and the head lie beside them, and the card says how to load the whole."""
    config = from_dict(configured(files, "feddpa", rounds=1))
    summary = experiment.train(config, tmp_path / "run")
    folder = tmp_path / "run/adapters/client0"
    assert {"classifier.weight", "classifier.bias", ANCHORS, SCALE} == set(load_file(folder / "gate.safetensors"))
    for expert in ("global", "local"):
        model = AutoModelForImageClassification.from_pretrained(files / "vit")
        loaded = peft.PeftModel.from_pretrained(model, str(folder / expert))
        assert loaded(pixel_values=torch.zeros(1, 3, 16, 16)).logits.shape == (1, 4)
    card = (folder / "README.md").read_text()
    assert "load_client" in card and "labels=4" in card and "classify" in card
    test = build.prepare(config, Reporter()).clients["client0"].data.queries["test"]
    personal = load_client(folder, str(files / "vit"), labels=4)
    found = personal.classify(torch.stack([picture.pixels for picture in test]))
    score = 100 * (found == torch.tensor([picture.label for picture in test])).double().mean()
    assert float(score) == pytest.approx(summary["scores"]["clients"]["client0"])
    with pytest.raises(UserError, match="this is an image model; give it what it classifies"):
        personal.generate(["a prompt"])


SETTINGS = ["method.samples=4", "method.grid=true"]


def task_of(files: Path) -> list[str]:
    return ["task.name=images", f"task.path={files / 'own.npz'}"]


def test_two_runs_merged_afterwards_are_the_runs_of_the_method(parents, tmp_path):
    merged = merge_adapters("potara", str(parents / "fedit"), str(parents / "local"), tmp_path, words=SETTINGS)
    logged = {x["client"]: x for x in read_records(parents / "potara/metrics.jsonl") if x["kind"] == "merge"}
    assert [*merged] == ["client0", "client1", "client2"]
    for client, recipe in merged.items():
        assert recipe["lambda_fed"] == logged[client]["lambda_fed"]
        own, expected = (
            load_file(folder / client / "adapter_model.safetensors")
            for folder in (tmp_path, parents / "potara/adapters")
        )
        assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
        assert any("classifier" in name for name in own)


def test_two_folders_are_merged_with_a_task_of_images(files, parents, tmp_path):
    fed, local = (str(parents / name / "adapters/client0") for name in ("fedit", "local"))
    ((client, found),) = merge_adapters("potara", fed, local, tmp_path, words=[*SETTINGS, *task_of(files)]).items()
    assert (client, found["samples"]) == ("all", 4) and 0 < found["lambda_fed"] < 1
    one, other, own = (
        load_file(Path(folder) / "adapter_model.safetensors") for folder in (fed, local, tmp_path / "all")
    )
    weight = found["lambda_fed"]
    for name, value in own.items():
        torch.testing.assert_close(value, weight * one[name] + (1 - weight) * other[name], rtol=0, atol=1e-6)


def test_what_of_images_cannot_be_merged(files, parents, tmp_path):
    fed, local = (str(parents / name / "adapters/client0") for name in ("fedit", "local"))

    def refused(match: str, *sources: str, words: Sequence[str] = ()) -> None:
        with pytest.raises(UserError, match=match):
            merge_adapters("potara", *sources, tmp_path / "out", words=[*SETTINGS, *words])
        assert not (tmp_path / "out").exists()

    whole = tmp_path / "whole"
    tree = tiny_images.tree(files / "own.npz", base={"name": str(files / "vit")}, method={"name": "local"}, rounds=1)
    experiment.train(from_dict(tree), whole)
    refused("whole trained whole models .adapter: null.; only adapters", str(parents / "fedit"), str(whole))
    bare = tmp_path / "bare"
    shutil.copytree(local, bare)
    settings = json.loads((bare / "adapter_config.json").read_text())
    (bare / "adapter_config.json").write_text(json.dumps({**settings, "modules_to_save": None}))
    kept = {name: value for name, value in load_file(bare / "adapter_model.safetensors").items() if "lora" in name}
    save_file(kept, bare / "adapter_model.safetensors")
    refused(r"bare has no classification head \(classifier\)", fed, str(bare), words=task_of(files))
    which = (
        r"has a classification head \(classifier\), so it is for an image model, or a sequence classifier; give --task"
    )
    refused(which, str(bare), local)


def test_one_adapter_is_scored_on_a_task_of_images(files, parents, tmp_path):
    """On all test pictures, of which each client of the run had a third."""
    folder = parents / "fedit/adapters/client0"
    found = evaluate_adapter(str(files / "vit"), folder, task_of(files))
    shares = json.loads((parents / "fedit/summary.json").read_text())["scores"]["clients"]
    assert found.metric == "accuracy" and found.clients == {"all": pytest.approx(sum(shares.values()) / 3)}
    with pytest.raises(UserError, match="it is for an image model, or a sequence classifier; give --task"):
        evaluate_adapter(str(files / "vit"), folder, [f"task.path={files / 'own.npz'}"])


def test_a_head_of_another_module_is_refused(tmp_path):
    base = tiny_images.vit()
    one = base.draw(ROUTED, torch.Generator().manual_seed(0))
    models.write(tmp_path / "experts", one, ROUTED, base, "card")
    assert peft_folders.read(tmp_path / "experts", base)[0].equal(one)
    with pytest.raises(UserError, match="and the head classifier, where .* and the head none are expected"):
        peft_folders.read(tmp_path / "experts", base, replace(ROUTED, whole=()))
    settings = json.loads((tmp_path / "experts/one/adapter_config.json").read_text())
    assert (settings["modules_to_save"], settings["task_type"]) == (None, None)
