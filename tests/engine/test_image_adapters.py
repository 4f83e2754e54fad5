"""Adapters of image models in the bank: fused training, experts and gates, gradients, losses, and merges."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny_images
import torch
from stock_training import by_the_formula, per_example_gradients
from tiny_images import LORA, assert_state, cross_entropy, stock, trained_by
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.engine import Engine
from llm_fed.kinds.images import Images, Pictures
from llm_fed.mergers.mixing import mixed
from llm_fed.method.requests import Distillation
from llm_fed.models.lora import ANCHORS, SCALE, Lora
from llm_fed.runtime.local import drive
from llm_fed.settings.config import LocalConfig
from llm_fed.state import State

ROUTED = LORA.with_experts("one", "two", "three", gate="router")
MIXED = LORA.with_experts("global", "local", gate="mix")
SIZES = {"a": 6, "b": 1, "c": 13, "d": 8}


@pytest.fixture(scope="module")
def base() -> Images:
    return tiny_images.vit()


def state(base: Images, structure: Lora, seed: int = 0) -> State:
    """A state without a zero in it: experts, routers and the head's bias all matter."""
    draws = torch.Generator().manual_seed(seed)
    fresh = base.draw(structure, draws)
    return fresh.like(fresh.row + 0.1 * torch.randn(fresh.row.shape, generator=draws, dtype=torch.float64))


def together(base: Images, structure: Lora, starts: dict[str, State], local: LocalConfig, **options: Any):
    """Clients of different sizes train in one pass: their results, sites and engine."""
    engine = Engine(base)
    sites = {
        id: tiny_images.party(base, tiny_images.pictures(SIZES[id], seed), id, structure, local, lr=0.02)
        for seed, id in enumerate(starts)
    }
    return drive({id: sites[id].fit(start, **options) for id, start in starts.items()}, engine.execute), sites, engine


# Training


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "clip": 0.4, "momentum": 0.9}])
def test_a_cohort_is_stock_peft_one_by_one(base, changes):
    """Clients of one to three steps, batches of one to five pictures, in the same micro-batches."""
    local = replace(tiny_images.LOCAL, batch_size=5, **changes)
    starts = {id: state(base, LORA, seed) for seed, id in enumerate(SIZES)}
    results, sites, engine = together(base, LORA, starts, local)
    work = engine.take_work()
    assert (work.tokens, work.padding) == (5 * sum(SIZES.values()), 0)  # 4 patches and one more
    assert work.micro_batches == 3  # one per step, whoever takes part
    for id, site in sites.items():
        wrapped = stock(base, starts[id]).train()
        entries = trained_by(wrapped)
        kind = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, momentum=local.momentum)}[local.optimizer]
        optimizer = kind(entries.values(), lr=0.02)
        losses = []
        for batch in site.batches(epochs=1):
            optimizer.zero_grad()
            loss = cross_entropy(base, wrapped, batch)
            losses.append(loss.item())
            loss.backward()
            if local.clip:
                nn.utils.clip_grad_norm_(entries.values(), local.clip)
            optimizer.step()
        assert_state(results[id], dict(entries), 1e-10)
        assert site.losses == pytest.approx(losses, rel=1e-6)


def test_dropout_is_each_pictures_own_and_spares_the_head(base):
    """Whatever the packing; the head reads its input as it is: with B = 0 dropout changes nothing of its gradient."""
    structure, local = replace(LORA, dropout=0.5), replace(tiny_images.LOCAL, batch_size=4)
    starts = {id: state(base, structure, seed) for seed, id in enumerate(SIZES)}
    fused, _, _ = together(base, structure, starts, local)
    plain, _, _ = together(base, LORA, starts, local)
    for id, start in starts.items():
        alone = together(base, structure, {id: start}, local)[0] if id == "a" else None  # its pictures' seed is 0
        if alone:
            assert_state(fused[id], alone[id].tensors(), 1e-10)
        assert (fused[id].row - plain[id].row).abs().max() > 1e-4
    fresh = {"a": base.draw(structure, torch.Generator().manual_seed(0))}
    ends = [
        together(base, one, fresh, local, train="classifier", steps=1)[0]["a"].select("classifier")
        for one in (structure, LORA)
    ]
    torch.testing.assert_close(ends[0].row, ends[1].row, rtol=0, atol=1e-12)
    assert not ends[0].equal(fresh["a"].select("classifier"))


def test_a_head_without_a_bias_in_half_precision(base):
    """Under autocast the logits are half, the rows and their gradients float32."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Linear(6, 3, bias=False))
    structure = Lora(rank=2, alpha=2, dropout=0.0, target_modules=("1",), whole=("2",))
    bank = AdapterBank(model, structure, 2)
    draws = torch.Generator().manual_seed(0)
    bank.rows.copy_(torch.randn(bank.rows.shape, generator=draws))
    assert bank.layout.names == ("1.lora_A", "1.lora_B", "2.weight")
    x = torch.randn(3, 3, 4, 4, generator=draws)
    with bank.attached(torch.tensor([1, 0, 1])), torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and bank.grads.dtype == torch.float32
    for n, k in enumerate((1, 0, 1)):
        own = State(bank.layout, bank.rows[k])
        hidden = model[1](x[n].flatten()) + own["1.lora_B"] @ own["1.lora_A"] @ x[n].flatten()
        torch.testing.assert_close(y[n].float(), own["2.weight"] @ hidden, rtol=0.05, atol=0.1)
    assert bank.grads[:, bank.layout.slices["2.weight"]].abs().sum(1).gt(0).all()


def test_only_linear_layers_are_trained_whole(base):
    structure = replace(LORA, whole=("vit.layernorm",))
    with pytest.raises(
        UserError, match="vit.layernorm is a LayerNorm; only linear layers can be trained whole beside adapters"
    ):
        AdapterBank(base.model, structure, 1)


def test_what_a_picture_counts_as(base):
    """A ViT's patches and one more; where adapters stand after the pooling, a token for 16 x 16 pixels."""
    assert Pictures.of(base, LORA).tokens == 5
    resnet = Lora(rank=1, alpha=1, dropout=0.0, target_modules=("classifier.1",))
    assert Pictures.of(replace(tiny_images.resnet(), size=48), resnet).tokens == 9

    class Windows(nn.Module):
        """Reads each picture in four parts."""

        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(3 * 16, 4), nn.Linear(16, 4)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.head(self.inner(pixel_values.reshape(4 * len(pixel_values), -1)).view(len(pixel_values), -1))

    windows = replace(tiny_images.around(Windows, 8, torch.float32), head="head")
    with pytest.raises(UserError, match="matches inner of 'tiny', which reads 4 rows per picture"):
        Pictures.of(windows, Lora(rank=1, alpha=1, dropout=0.0, target_modules=("inner",)))


# Gradients and answers


@pytest.mark.parametrize("structure", [LORA, ROUTED], ids=["plain", "router"])
@pytest.mark.parametrize("budget", [None, 12])
def test_per_example_gradients_are_those_of_a_loop(base, structure, budget):
    pictures, one = tiny_images.pictures(7), state(base, structure)
    kind = Pictures.of(base, structure)
    found = per_example_gradients(AdaptedModel(base.model, structure, kind, budget=budget), one, pictures)
    engine, site = Engine(base), tiny_images.party(base, pictures, structure=structure)
    for row, picture in zip(found, pictures, strict=True):
        loss, alone = tiny_images.answer(engine, site.gradient(one, [picture]))
        torch.testing.assert_close(row, -alone.row, rtol=0, atol=1e-12)
    entries = {name: nn.Parameter(value.clone()) for name, value in one.tensors().items()}
    if structure is ROUTED:
        with by_the_formula(base.model, structure, entries) as module:
            expected = cross_entropy(base, module, pictures)
    else:
        wrapped = stock(base, one)
        entries, expected = trained_by(wrapped), cross_entropy(base, wrapped, pictures)
    expected.backward()
    gradient = State(one.layout, -found.mean(0))
    assert_state(gradient, {name: p.grad for name, p in entries.items() if p.grad is not None}, 1e-12)
    assert (found.std(0) > 1e-4).any()
    evidence = tiny_images.answer(engine, site.gradient_moments(one, one * 0.5, pictures))
    torch.testing.assert_close(evidence.fisher[0], found.square().mean(0), rtol=0, atol=1e-12)
    assert evidence.losses[0] == pytest.approx(expected.item(), rel=1e-6)
    drawn = tiny_images.answer(engine, site.gradient_moments(one, one * 0.5, pictures, sampled=True))
    assert not torch.allclose(drawn.fisher, evidence.fisher)


def test_pictures_are_mixed_by_similarity(base, monkeypatch):
    """alpha = scale * the mean cosine of what the base's own head reads, by hand; several clients in passes of four."""
    monkeypatch.setattr("llm_fed.engine.trainable.budget_and_overhead", lambda device: (20, 0))
    pictures = tiny_images.pictures(6)
    engine = Engine(base)
    sites = {id: tiny_images.party(base, pictures, id, MIXED) for id in "ab"}
    features = tiny_images.answer(engine, sites["a"].features(pictures))
    with torch.no_grad():
        inputs = base.prepare(torch.stack([picture.pixels for picture in pictures]))
        hidden = base.model.vit(pixel_values=inputs).last_hidden_state[:, 0]
    torch.testing.assert_close(features, hidden, rtol=0, atol=1e-12)
    states = {}
    for seed, id in enumerate(sites):
        one = state(base, MIXED, seed)
        states[id] = State(
            one.layout, one.row, {ANCHORS: features[seed : seed + 2], SCALE: torch.tensor(0.6, dtype=torch.float64)}
        )
    found = drive({id: site.logits(states[id], pictures) for id, site in sites.items()}, engine.execute)
    for seed, id in enumerate(sites):
        cosine = nn.functional.cosine_similarity(hidden[:, None], hidden[None, seed : seed + 2], dim=-1).mean(1)
        alpha = (0.6 * cosine).clamp(0, 1)
        assert alpha.std() > 1e-3
        with (
            torch.no_grad(),
            by_the_formula(base.model, MIXED, states[id].tensors(), torch.stack([1 - alpha, alpha], 1)),
        ):
            torch.testing.assert_close(found[id], base.model(pixel_values=inputs).logits, rtol=0, atol=1e-10)
    losses = tiny_images.answer(engine, sites["a"].losses_of([*states.values()], pictures))
    labels = torch.tensor([picture.label for picture in pictures])
    assert losses == pytest.approx([float(nn.functional.cross_entropy(found[id], labels)) for id in sites], abs=1e-10)
    assert math.isnan(*tiny_images.answer(engine, sites["a"].losses_of([states["a"]], [])))


def test_distillation_follows_the_teachers_mean_logits(base):
    """The divergence of the predictions from theirs, in a plain loop; a teacher beside another client's. In two epochs
    each teacher sees a picture once."""
    seen: list[int] = []
    engine, start = Engine(base), state(base, LORA)
    sites = {
        id: tiny_images.party(base, tiny_images.pictures(9, seed), id, LORA, lr=0.02) for seed, id in enumerate("ab")
    }
    teachers = {id: [state(base, LORA, 3 + seed), state(base, LORA, 5)] for seed, id in enumerate(sites)}
    work = {id: site.fit(start, loss=Distillation(teachers[id]), epochs=2) for id, site in sites.items()}
    base.examples(LORA)  # looks at the base once, with two blank pictures
    head = base.model.get_submodule(base.head)
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    found = drive(work, engine.execute)
    handle.remove()
    assert sum(seen) == len(sites) * 9 * (2 + 2)  # two epochs of the student, and two teachers
    for id, site in sites.items():
        student, taught = stock(base, start), [stock(base, one) for one in teachers[id]]
        optimizer = torch.optim.Adam(trained_by(student).values(), lr=0.02)
        for batch in site.batches(epochs=2):
            inputs = base.prepare(torch.stack([picture.pixels for picture in batch]))
            with torch.no_grad():
                wanted = torch.stack([one(pixel_values=inputs).logits for one in taught]).mean(0).log_softmax(-1)
            optimizer.zero_grad()
            log_p = student(pixel_values=inputs).logits.log_softmax(-1)
            nn.functional.kl_div(log_p, wanted, reduction="batchmean", log_target=True).backward()
            optimizer.step()
        assert_state(found[id], dict(trained_by(student)), 1e-10)


@pytest.mark.parametrize("space", ["factors", "delta"])
def test_a_merge_mixes_the_heads_by_its_weight(base, space):
    """In `delta` every adapted layer's B A is the weighted mean of the two; the head's entries are in both."""
    fed, local = state(base, LORA, 1), state(base, LORA, 2)
    merged = mixed(fed, local, 0.3, space)
    for name in ("classifier.weight", "classifier.bias"):
        torch.testing.assert_close(merged[name], 0.3 * fed[name] + 0.7 * local[name], rtol=0, atol=1e-12)
    layer = "vit.layers.0.attention.q_proj"
    product = merged[f"{layer}.lora_B"] @ merged[f"{layer}.lora_A"]
    mean = sum(w * one[f"{layer}.lora_B"] @ one[f"{layer}.lora_A"] for w, one in ((0.3, fed), (0.7, local)))
    assert torch.allclose(product, mean, atol=1e-12) == (space == "delta")
    assert merged.layout == base.layout(LORA.doubled() if space == "delta" else LORA)
    if space == "factors":
        apart = mixed(fed, local, {"lora_A": 1.0, "lora_B": 0.0, "head": 0.25}, space)
        assert torch.equal(apart[f"{layer}.lora_A"], fed[f"{layer}.lora_A"])
        assert torch.equal(apart[f"{layer}.lora_B"], local[f"{layer}.lora_B"])
        expected = 0.25 * fed["classifier.bias"] + 0.75 * local["classifier.bias"]
        torch.testing.assert_close(apart["classifier.bias"], expected, rtol=0, atol=1e-12)
