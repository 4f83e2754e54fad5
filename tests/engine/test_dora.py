"""DoRA against stock PEFT: training, folders and folded weights; with preferences, and what it does not go with."""

import copy
from dataclasses import replace

import peft
import pytest
import tiny
import tiny_base
import torch
from stock_training import cohort, fitted, stock

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.bench.build import check_kinds
from llm_fed.engine.bank import AdapterBank
from llm_fed.export import models, peft_folders
from llm_fed.export.folding import fold
from llm_fed.kinds.language import Language
from llm_fed.models.lora import Lora, draw
from llm_fed.settings.configfile import from_dict
from llm_fed.state import MAGNITUDE
from llm_fed.tasks.common import TaskData


def structure_of(kind: str, dropout: float = 0.0) -> Lora:
    return Lora(rank=3, alpha=5, dropout=dropout, target_modules=tiny.TARGETS[kind], dora=True)


def moved(model, structure, dtype=torch.float64):
    """An adapter that is not what it was drawn as."""
    state = draw(model, structure, torch.Generator().manual_seed(0), dtype=dtype)
    noise = torch.randn(state.row.numel(), dtype=dtype, generator=torch.Generator().manual_seed(1))
    return state.like(state.row + 0.1 * noise)


def logits_of(model, structure, state, kind):
    bank = AdapterBank(model, structure, 1, state.row.dtype)
    bank.load(0, state)
    with torch.no_grad(), bank.attached(torch.tensor([0, 0])):
        return model(**tiny.inputs(kind, 2)).logits


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_fused_training_is_that_of_stock_peft(kind):
    """GPT-2's layers have biases, and weights that are transposed."""
    model, structure = tiny.build(kind, torch.float64), structure_of(kind)
    jobs = cohort(model, structure)
    for job, result in zip(jobs, fitted(model, structure, jobs), strict=True):
        expected, losses = stock(model, structure, job)
        trained = [name for name in expected if float((expected[name] - job.start[name]).abs().max()) > 1e-3]
        assert any(name.endswith(MAGNITUDE) for name in trained)
        assert float((result.state.row - expected.row).abs().max()) <= 1e-9
        assert result.losses == pytest.approx(losses, rel=1e-5)


def test_a_new_adapter_changes_nothing_and_fused_is_alone_under_dropout():
    model, structure = tiny.build("llama", torch.float64), structure_of("llama", 0.2)
    fresh = draw(model, structure, torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        plain = model(**tiny.inputs("llama", 2)).logits
    torch.testing.assert_close(logits_of(model, structure, fresh, "llama"), plain, rtol=0, atol=1e-9)
    jobs = cohort(model, structure)
    for job, result in zip(jobs, fitted(model, structure, jobs), strict=True):
        (alone,) = fitted(model, structure, [job])
        assert float((result.state.row - alone.state.row).abs().max()) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_stock_peft_loads_what_is_written_and_folding_computes_the_same(kind, tmp_path):
    base, structure = tiny_base.around(tiny.build(kind)), structure_of(kind)
    state = moved(base.model, structure, torch.float32)
    models.write(tmp_path / "a", state, structure, base, "")
    ours = logits_of(base.model, structure, state, kind)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / "a").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**tiny.inputs(kind, 2)).logits, ours, rtol=0, atol=1e-5)
    again, known = peft_folders.read(tmp_path / "a", base)
    assert again.equal(state) and known.dora
    with pytest.raises(UserError, match="is a DoRA adapter, where LoRA is expected; set adapter.dora=true"):
        peft_folders.read(tmp_path / "a", base, replace(structure, dora=False))
    whole = copy.deepcopy(base.model)
    fold(whole, structure, state, tmp_path / "a")
    with torch.no_grad():
        torch.testing.assert_close(whole(**tiny.inputs(kind, 2)).logits, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedit", {}, ""),
        ("ditto", {}, ""),
        ("fedmerge", {}, ""),
        ("flora", {}, "flora computes with products of A and B"),
        ("potara", {}, "potara computes with products of A and B"),
        ("fedit", {"base": {"quantization": "nf4"}}, "base.quantization=null"),
        ("fedavg", {"adapter": {"dora": True, "rank": [2, 4]}}, "needs the same rank at all of them"),
    ],
)
def test_methods_that_compute_with_products_are_refused(method, changes, message):
    config = from_dict({"adapter": {"dora": True}, "method": {"name": method}, **changes})
    task = TaskData("files", "rouge1", {})
    if not message:
        check_kinds(Language, config, task, methods.build({"name": method}), "rouge1")
        return
    with pytest.raises(UserError, match=message):
        check_kinds(Language, config, task, methods.build({"name": method}), "rouge1")


def test_several_adapters_on_a_layer_are_refused():
    with pytest.raises(UserError, match="adapter.dora=false"):
        methods.build({"name": "pfedmoe"}).wrap(structure_of("llama"), None)
