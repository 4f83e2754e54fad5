"""Whole runs on images: every method that suits whole models, killed and continued, and the commands afterwards."""

import json
from pathlib import Path
from typing import Any

import every
import huggingface_hub
import pytest
import tiny_images
import torch
from equal_runs import files
from image_runs import RUNS, UNLIKE, Killer, configured
from safetensors.torch import load_file

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.bench.costs import read_traffic
from llm_fed.commands.evaluate import evaluate_run, export
from llm_fed.experiment import run
from llm_fed.runs.records import read_records
from llm_fed.settings.configfile import from_dict


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_images.of_two_domains(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """By name in RUNS the folder of an undisturbed run, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("run") / "run"
            run.train(from_dict(configured(data, name)), made[name])
        return made[name]

    return folder


# One of each: late answers, a server with data, models that differ. `make long` runs the others.
QUICK = {"fedit", "center", "feddle out of domain", "fedkd of unlike models"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_every_method_of_whole_models_runs_and_continues_bit_identically(data, finished, tmp_path, name):
    whole = finished(name)
    assert (whole / "report.html").read_text().count("data:image/png") >= 2
    summary = json.loads((whole / "summary.json").read_text())
    lines = read_records(whole / "metrics.jsonl")
    assert [line["round"] for line in lines if line["kind"] == "round"] == [1, 2, 3]
    assert not [line for line in lines if line["kind"] == "event"]
    scored = (
        {"server"} if RUNS[name].get("task", {}).get("server", {}).get("test") else {"client0", "client1", "client2"}
    )
    assert set(summary["scores"]["clients"]) == scored == {path.name for path in (whole / "adapters").iterdir()}
    assert 0 <= summary["scores"]["mean"] <= 100 and summary["scores"]["metric"] == "accuracy"
    with pytest.raises(KeyboardInterrupt):
        run.train(from_dict(configured(data, name)), tmp_path / "run", reporter=Killer(3))
    run.train(from_dict(configured(data, name)), tmp_path / "run")
    assert files(tmp_path / "run") == files(whole)


def test_clients_get_their_models_in_turn(finished):
    """The shared one stands beside each."""
    parts = [json.loads((finished("fml") / f"adapters/client{k}/config.json").read_text())["parts"] for k in range(3)]
    assert parts == [[["own", own], ["small", "cnn"]] for own in ("cnn", "resnet-9", "cnn")]


def test_one_model_for_all_is_the_servers(finished):
    """Where everybody gets one model, what is exported for each client is the same; with local training it is not."""
    for name, same in (("fedbuff", True), ("feddf", True), ("local", False)):
        states = [load_file(folder / "model.safetensors") for folder in sorted((finished(name) / "adapters").iterdir())]
        assert len(states) == 3
        assert all(torch.equal(states[0]["head.weight"], state["head.weight"]) for state in states) == same


def test_the_report_of_a_search_has_its_coefficients(finished):
    lines = [line for line in read_records(finished("feddle") / "metrics.jsonl") if line["kind"] == "server"]
    assert lines and all(len(line["coefficients"]) == len(line["fallback"]) <= 6 for line in lines)
    assert any(c != f for line in lines for c, f in zip(line["coefficients"], line["fallback"], strict=True))


@pytest.mark.parametrize("name", every.quick(["fedlora", "ifca", "fedmerge", "fedbuff", "feddle", "feddf"], ["feddf"]))
def test_running_statistics_travel_and_survive(data, tmp_path, name):
    """A ResNet with BatchNorm: its statistics are in what is exported."""
    base = tmp_path / "resnet"
    tiny_images.save(tiny_images.resnet(torch.float32), base)
    tree = configured(data, name, base={"name": str(base)})
    run.train(from_dict(tree), tmp_path / "whole")
    (folder, *_) = (tmp_path / "whole/adapters").iterdir()
    statistics = {k: v for k, v in load_file(folder / "model.safetensors").items() if "running_mean" in k}
    assert statistics and all(value.abs().max() > 1e-4 for value in statistics.values())
    assert not [line for line in read_records(tmp_path / "whole/metrics.jsonl") if line["kind"] == "event"]


# What the commands make of such runs


@pytest.mark.parametrize("name", every.quick(["local", "fed+ft", "fedmoe", "fedem"], ["local", "fedmoe"]))
def test_a_run_is_scored_again_and_exported(finished, tmp_path, name):
    folder = finished(name)
    scores = json.loads((folder / "summary.json").read_text())["scores"]
    again = evaluate_run(folder)["scores"]
    assert (again["clients"], again["metric"]) == (scores["clients"], "accuracy")
    if name == "local":
        again = evaluate_run(folder, split="validation", settings=["eval.limit=1"])["scores"]
        assert set(again["clients"].values()) <= {0.0, 100.0}
    for path in export(folder, tmp_path):
        assert {file.name for file in path.iterdir()} == {
            "README.md", "config.json", "model.safetensors", "preprocessor_config.json"
        }  # fmt: skip


def test_traffic_is_per_client_where_the_server_is_tested(finished):
    """One model is exported, but three clients were sent one in each round."""
    lines = [line for line in read_records(finished("center") / "metrics.jsonl") if line["kind"] == "client"]
    traffic = read_traffic(finished("center"))
    assert len(lines) == 9 and traffic.down == sum(line["bytes_down"] for line in lines) / 3


# Mistakes


def refused(tree: dict[str, Any], folder: Path, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        run.train(from_dict(tree), folder / "run")
    for part in parts:
        assert part in str(raised.value)
    assert len(str(raised.value)) < 500 and not (folder / "run").exists()


def test_methods_of_adapters_need_adapters(data, tmp_path):
    alone = [name for name in methods.BUILTIN if methods.build({"name": name}).adapters_only]
    assert set(alone) == {
        "ffa", "fedsa", "feddpa", "fedalt", "rolora", "fedrot-lora", "fedsvd", "hetlora", "flexlora", "flora",
        "fedex-lora", "potara", "fisher-merging", "mean", "grid", "task-arithmetic", "ties", "dare", "slerp",
    }  # fmt: skip
    for name in alone:
        said = f"{name} trains, sends or merges parts of LoRA adapters, but adapter is null; set adapter.rank"
        refused(configured(data, "local", method={"name": name}), tmp_path, said)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"base": {"name": "cmn"}}, ["base.name='cmn' is not a folder here", "Built here: cnn, cnn-1"]),
        ({"base": {"name": "./cnn"}}, ["base.name='./cnn' is not a folder; give one, cnn, cnn-1"]),
        ({"base": {"quantization": "int8"}}, ["base.quantization", "language models"]),
        ({"base": {"dtype": "float16"}}, ["base.dtype=float16", "bfloat16"]),
        ({"base": {"activation_checkpointing": True}}, ["base.activation_checkpointing", "language models"]),
        ({"eval": {"metric": "rouge1"}}, ["eval.metric=rouge1 does not fit task.name=images", "eval.metric=accuracy"]),
        ({"task": {"server": {"test": True}}}, ["task.server.test=true", "local gives each", "task.server.test=false"]),
        ({"adapter": {"target_modules": ["query"]}}, ["adapter.target_modules=('query',) matches no layer of CNN"]),
        ({"local": {"optimizer": "adan"}}, ["local.optimizer='adan'", "adam"]),
        ({**UNLIKE, "method": {"name": "fedavg"}}, ["fedavg needs the same model at all", "leave base.clients out"]),
    ],
)
def test_what_does_not_go_together(data, tmp_path, monkeypatch, changes, parts):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    refused(configured(data, "local", **changes), tmp_path, *parts)


def test_text_is_neither_scored_by_accuracy_nor_trained_whole(small, tmp_path):
    refused(small.tree(eval={"metric": "accuracy"}), tmp_path, "eval.metric=accuracy does not fit", "task.name=files")
    refused({**small.tree(), "adapter": None}, tmp_path, "adapter is null", "set adapter.rank")
