"""Whole runs on a 4-bit base, and with activation checkpointing: they train, continue, evaluate and export like any."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import small_run
import tiny_base
import torch
from peft import PeftModel
from safetensors.torch import load_file

from llm_fed import load_client
from llm_fed.engine import fit as training
from llm_fed.engine.bank import AdapterBank
from llm_fed.experiment import run as experiment
from llm_fed.export import peft_folders
from llm_fed.kinds import language
from llm_fed.kinds.language import load_base
from llm_fed.models.base import Base
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile
from llm_fed.settings.config import BaseConfig

NF4 = {"quantization": "nf4"}


@pytest.fixture(scope="module")
def wide(small, tmp_path_factory) -> small_run.Small:
    """A base whose layers are wide enough for blocks of 64 values."""
    folder = tmp_path_factory.mktemp("wide")
    base = tiny_base.folder(folder, hidden_size=64, intermediate_size=128, initializer_range=0.05)
    return small_run.Small(base, small.data)


@pytest.fixture
def train(wide, tmp_path) -> Callable[..., Path]:
    def run(name: str, **changes: Any) -> Path:
        config = wide.config(tmp_path / f"{name}.yaml", **{"method": {"name": "fedmerge", "num_models": 2}, **changes})
        experiment.train(configfile.load(config), tmp_path / name)
        return tmp_path / name

    return run


def adapters_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("adapters/*/adapter_model.safetensors"))
    assert len(files) == len(small_run.CLIENTS)
    return {f"{file.parent.name}/{key}": value for file in files for key, value in load_file(file).items()}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_records(folder / "metrics.jsonl") if line["kind"] == "round"]


def test_a_run_on_a_4bit_base(train, llm_fed):
    """It learns, and `eval` gives its scores again."""
    whole = train("whole", base=NF4, local={"steps": 8})
    assert losses(whole)[-1] < losses(whole)[0] - 0.3
    scores = json.loads((whole / "summary.json").read_text())["scores"]
    result = json.loads(llm_fed("eval", whole, "--json").out)
    shared = result.keys() & scores.keys()
    assert {"clients", "mean", "loss"} <= shared and result["mean"] > 0
    assert {key: result[key] for key in shared} == {key: scores[key] for key in shared}


def test_an_exported_adapter_on_the_same_4bit_base_in_stock_peft(train, llm_fed, tmp_path):
    """The logits are those of the run's own bank; the adapter matters, and so does the quantization."""
    run = train("run", base=NF4)
    assert llm_fed("export", run, tmp_path / "out", "--client", "bob").code == 0
    config = configfile.load(run / "config.yaml")
    base, whole = load_base(config.base, "cpu"), load_base(replace(config.base, quantization=None), "cpu")
    assert isinstance(base.model.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    state, structure = peft_folders.read(run / "adapters/bob", base)
    bank = AdapterBank(base.model, structure, 1)
    bank.load(0, state)
    ids = torch.tensor([[20, 21, 7, 8], [22, 23, 7, 8]])
    with torch.no_grad():
        plain = base.model(ids).logits
        with bank.attached(torch.zeros(2, dtype=torch.int64)):
            expected = base.model(ids).logits
        found = PeftModel.from_pretrained(base.model, tmp_path / "out/bob")(ids).logits
        unquantized = PeftModel.from_pretrained(whole.model, tmp_path / "out/bob")(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - plain).abs().max() > 1e-2
    assert (found - unquantized).abs().max() > 1e-2


def test_an_adapter_is_used_on_the_base_as_it_was_quantised_in_training(train, wide, llm_fed, tmp_path):
    """By `eval`, `merge` and `load_client`, unless it is set; and `export` tells servers."""
    run = train("run", base=NF4, local={"steps": 8})
    adapter, data = run / "adapters/bob", ("--data", wide.data / "bob/test.jsonl", "--json")
    said = llm_fed("eval", "--base", wide.base, "--adapter", adapter, *data)
    assert "the base is quantised to nf4, as when the adapter was trained" in said.err
    explicit = {
        name: llm_fed("eval", "--base", wide.base, "--adapter", adapter, *data, f"base.quantization={name}")
        for name in ("nf4", "null")
    }
    assert json.loads(said.out) == json.loads(explicit["nf4"].out) != json.loads(explicit["null"].out)
    assert "quantised" not in explicit["nf4"].err + explicit["null"].err
    personal = load_client(adapter, str(wide.base))
    assert isinstance(personal.base.model.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)  # type: ignore[union-attr]

    said = llm_fed("merge", "mean", "--fed", adapter, "--local", run / "adapters/ada", "--out", tmp_path / "merged")
    assert said.code == 0 and "quantised to nf4" in said.err
    assert json.loads((tmp_path / "merged/merged/prompt.json").read_text())["base"]["quantization"] == "nf4"
    whole = train("whole")
    said = llm_fed("export", run, tmp_path / "out", "--client", "bob")
    assert "vLLM and LoRAX can serve bob" in said.err
    assert "in nf4" not in llm_fed("eval", "--base", wide.base, "--adapter", whole / "adapters/bob", *data).err


def test_activation_checkpointing_recomputes_and_changes_nothing(train, monkeypatch):
    """Each training pass of a layer is computed twice, evaluation's once, and the adapters stay the same."""
    passes = {"layer": 0, "training": 0}

    def counted(config: BaseConfig, device: str) -> Base:
        base = load_base(config, device)
        base.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: count("layer"))
        return base

    def count(what: str) -> None:
        passes[what] += 1

    def counted_pass(*args: Any, **settings: Any) -> None:
        count("training")
        passed(*args, **settings)

    passed = training.one_pass
    monkeypatch.setattr(language, "load_base", counted)
    monkeypatch.setattr(training, "one_pass", counted_pass)
    plain = adapters_of(train("plain"))
    once = dict(passes)
    recomputed = adapters_of(train("recomputed", base={"activation_checkpointing": True}))
    assert once["training"] > 0 and passes["training"] == 2 * once["training"]
    assert passes["layer"] - once["layer"] == once["layer"] + once["training"]
    for name, value in recomputed.items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-5)
