"""Losses and gradients of preferences against TRL's own trainers, where TRL is installed (`pip install trl`); llm_fed
does not need it."""

import contextlib
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import tiny
import torch
from byte_tokenizer import byte_tokenizer
from preference_runs import LORA, PAIRS, encoded_pairs, gradient, moved, with_reference
from torch import nn

from llm_fed.settings.objective import ObjectiveConfig

trl = pytest.importorskip("trl", reason="TRL is not installed")
peft = pytest.importorskip("peft")


class Exact(nn.Module):
    """A model whose log-probabilities are those of its logits in float64; TRL computes them in float32."""

    is_gradient_checkpointing = False

    def __init__(self, model: Any, adapters: bool = True):
        super().__init__()
        self._model, self._adapters = [model], adapters  # in a list, so that it is no part of this module

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **options: Any) -> SimpleNamespace:
        (model,) = self._model
        with contextlib.nullcontext() if self._adapters else model.disable_adapter():
            logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        wanted = labels[:, 1:]
        logps = logits.log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
        nothing = torch.zeros_like(logps)
        return SimpleNamespace(log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


@pytest.mark.parametrize(
    ("objective", "stock"),
    [
        (ObjectiveConfig("dpo", beta=0.3), {"loss_type": "sigmoid", "beta": 0.3}),
        (ObjectiveConfig("ipo", beta=0.2), {"loss_type": "ipo", "beta": 0.2}),
    ],
    ids=["dpo", "ipo"],
)
def test_ten_pairs_have_the_loss_and_the_gradient_of_trl(objective, stock, tmp_path):
    """In float64, at an adapter that has moved away from the base."""
    tokenizer = byte_tokenizer()
    model: Any = tiny.build("llama", torch.float64, vocab_size=len(tokenizer))
    state, pairs = moved(model), encoded_pairs(tokenizer)
    loss, ours = gradient(model, objective, state, with_reference(model, objective, pairs))
    settings = trl.DPOConfig(
        str(tmp_path), use_cpu=True, report_to="none", bf16=False, max_length=None, per_device_train_batch_size=10,
        gradient_checkpointing=False, disable_dropout=True, **stock,
    )  # fmt: skip
    data = datasets.Dataset.from_list(
        [{"prompt": f"{asked}\n", "chosen": chosen, "rejected": other} for asked, chosen, other in PAIRS]
    )
    adapter = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.target_modules), lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        tiny.build("llama", vocab_size=len(tokenizer)), args=settings, train_dataset=data, processing_class=tokenizer,
        peft_config=adapter,
    )  # fmt: skip
    stock_model = trainer.model.double()
    parameters = dict(stock_model.named_parameters())
    by_name = {
        name: next(p for key, p in parameters.items() if key.endswith(f"{name}.default.weight")) for name in state
    }
    with torch.no_grad():
        for name, parameter in by_name.items():
            parameter.copy_(state[name])
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(len(PAIRS))])
    trainer.model, trainer.ref_model = Exact(stock_model), Exact(stock_model, adapters=False)
    theirs = trainer._compute_loss(trainer.model, batch, False)
    theirs.backward()
    assert loss == pytest.approx(float(theirs.detach()), abs=1e-10)
    for name, parameter in by_name.items():
        assert float((ours[name] - parameter.grad).abs().max()) <= 1e-10
