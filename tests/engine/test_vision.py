"""Training, losses and gradients of image models against plain loops of PyTorch and stock PEFT."""

import copy
import re
from dataclasses import replace
from typing import Any

import peft
import pytest
import tiny_images
import torch
from tiny_images import BATCHES, LORA, MAKERS, assert_state, cross_entropy, loaded, trained_by
from torch import Tensor, nn

from llm_fed.basics.errors import ClientError, UserError
from llm_fed.engine.engine import Engine
from llm_fed.kinds.images import Images
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.site import Site
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Full
from llm_fed.runtime.local import drive
from llm_fed.settings.config import LocalConfig
from llm_fed.state import State


def plain(
    base: Images, module: nn.Module, local: LocalConfig, lr: float, batches: Any, train: str = "", proximal: float = 0.0
) -> tuple[dict[str, Tensor], list[float]]:
    """Training as anyone would write it: the module's values after it, and the losses."""
    module.requires_grad_(True).train()
    parameters = [parameter for name, parameter in module.named_parameters() if re.search(train, name)]
    start = [parameter.detach().clone() for parameter in parameters]
    makers = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    momentum = {"momentum": local.momentum} if local.momentum else {}
    optimizer = makers[local.optimizer](parameters, lr=lr, weight_decay=local.weight_decay, **momentum)
    losses = []
    for batch in batches:
        loss = cross_entropy(base, module, batch)
        losses.append(loss.item())
        drift = sum((p - s).square().sum() for p, s in zip(parameters, start, strict=True))
        optimizer.zero_grad()
        (loss + proximal * drift).backward()
        if local.clip is not None:
            nn.utils.clip_grad_norm_(parameters, local.clip)
        optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items()}, losses


def fit(site: Site, engine: Engine, state: State, batches: Any = BATCHES, **options: Any) -> State:
    """`site.fit` on these batches, with changes to the site's optimizer among the options."""
    changes = {key: options.pop(key) for key in ("lr", "proximal", "correction") if key in options}
    examples = [picture for batch in batches for picture in batch]
    numbers = iter(range(len(examples)))
    places = [[next(numbers) for _ in batch] for batch in batches]
    site.indices = lambda *_: places  # type: ignore[method-assign]
    site.losses = []
    return tiny_images.answer(
        engine, site.fit(state, examples=examples, optimizer=replace(site.optimizer, **changes), **options)
    )


@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "adamw", "clip": 0.5, "weight_decay": 0.3}, {"optimizer": "sgd", "momentum": 0.5}]
)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_fit_is_a_plain_loop(kind, changes):
    """One of the batches is of one picture; running statistics are the state's extras."""
    base, local = MAKERS[kind](), replace(tiny_images.LOCAL, **changes)
    site = tiny_images.party(base, BATCHES[0], local=local, lr=0.02)
    start = site.initial()
    before = start.row.clone(), {name: value.clone() for name, value in start.extras.items()}
    found = fit(site, Engine(base), start)
    expected, losses = plain(base, loaded(base, start), local, 0.02, BATCHES)
    assert_state(found, expected)
    assert site.losses == pytest.approx(losses, abs=1e-12)
    assert set(found) | set(found.extras) == {name for name, value in expected.items() if value.is_floating_point()}
    assert ("running_var" in " ".join(found.extras)) == (kind == "resnet")
    assert (found.row - start.row).abs().max() > 0.01
    assert torch.equal(start.row, before[0])
    assert all(torch.equal(start.extras[name], value) for name, value in before[1].items())


@pytest.mark.parametrize(
    "kind, train", [("cnn", r"conv1|head\.bias"), ("resnet", r"^resnet\.encoder"), ("vit", "head|norm")]
)
def test_a_part_of_the_model_is_trained(kind, train):
    """Clipping and the proximal term count that part alone; statistics move all the same."""
    base, local = MAKERS[kind](), replace(tiny_images.LOCAL, clip=0.3)
    site = tiny_images.party(base, BATCHES[0], local=local)
    start = site.initial()
    found = fit(site, Engine(base), start, train=train, lr=0.02, proximal=0.1)
    assert_state(found, plain(base, loaded(base, start), local, 0.02, BATCHES, train, proximal=0.1)[0])
    chosen = start.layout.matching(train)
    for name in start:
        assert torch.equal(found[name], start[name]) == (name not in chosen), name
    with pytest.raises(UserError, match="matches none of"):
        fit(site, Engine(base), start, train="lora_B")


def test_training_goes_on_by_steps_or_epochs():
    """Seven pictures in batches of three are three steps an epoch; a second fit of a round sees another order."""
    base = tiny_images.cnn()
    local = LocalConfig(steps=None, epochs=2, batch_size=3, optimizer="adam")
    site, engine = tiny_images.party(base, BATCHES[0] + BATCHES[1], local=local), Engine(base)
    for options, steps in (({}, 6), ({"epochs": 1}, 3), ({"steps": 4}, 4)):
        site.begin(1, 0.01)
        fitted = tiny_images.answer(engine, site.fit(site.initial(), **options))
        assert len(site.losses) == steps and not fitted.equal(site.initial())
    assert (engine.work.tokens, engine.work.micro_batches) == (14 + 7 + 10, 13)
    site.begin(1, 0.01)
    twice = [tiny_images.answer(engine, site.fit(site.initial(), epochs=1)) for _ in range(2)]
    assert not twice[0].equal(twice[1])


def test_a_state_of_other_entries_is_not_loaded():
    model = tiny_images.resnet().flat(Full())
    state = model.read()
    assert state.extras and all(value.is_floating_point() for value in state.extras.values())
    for wrong in (
        State(state.layout, state.row),
        State(state.layout, state.row, {**state.extras, "more": torch.zeros(1)}),
        State(state.select("classifier").layout, state.select("classifier").row, state.extras),
    ):
        with pytest.raises(ValueError, match="entries are not those of ResNetForImageClassification"):
            model.load(wrong)


def test_channels_and_sizes_are_made_to_fit():
    """Grey pictures fill three channels, and others are scaled; a uniform picture stays uniform: 51 / 255 = 0.2 is
    (0.2 - 0.5) / 0.5 = -0.6."""
    base = tiny_images.cnn()
    for shape in ((1, 32, 32), (3, 32, 32), (1, 28, 28), (3, 40, 50)):
        found = base.prepare(torch.full((2, *shape), 51, dtype=torch.uint8))
        assert found.shape == (2, 3, 32, 32)
        torch.testing.assert_close(found, torch.full_like(found, -0.6), rtol=0, atol=1e-12)
    pixels = torch.randint(256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    halves = nn.functional.avg_pool2d(base.prepare(pixels), 8)
    torch.testing.assert_close(halves, nn.functional.avg_pool2d(pixels / 127.5 - 1, 16).double(), rtol=0, atol=0.05)


# One client and the next


def test_nothing_of_one_client_is_left_for_the_next():
    """No statistics, moments of Adam, or dropout draws: any order, and alone, gives the same bits; of adapters, which
    share passes, the same up to the rounding of another packing."""
    for base, structure, tolerance in (
        (tiny_images.resnet(), Full(), 0.0),
        (tiny_images.vit(hidden_dropout_prob=0.3), Full(), 0.0),
        (tiny_images.vit(hidden_dropout_prob=0.3), replace(LORA, dropout=0.4), 1e-10),
    ):

        def results(*order: str, base=base, structure=structure) -> dict[str, State]:
            engine = Engine(base)
            sites = {
                id: tiny_images.party(base, tiny_images.pictures(9, seed), id, structure)
                for seed, id in enumerate(("a", "b", "c"))
            }
            return drive({id: sites[id].fit(sites[id].initial()) for id in order}, engine.execute)

        together = results("a", "b", "c")
        for other in (results("c", "a", "b"), *(results(id) for id in together)):
            for id, state in other.items():
                assert_state(state, {**together[id].tensors(), **together[id].extras}, tolerance)
        assert not together["a"].equal(together["b"])


def test_dropout_is_active_in_training_alone_and_leaves_the_global_generator():
    for base, structure, same in (
        (tiny_images.vit(), LORA, True),
        (tiny_images.vit(), replace(LORA, dropout=0.5), False),
        (tiny_images.vit(), Full(), True),
        (tiny_images.vit(hidden_dropout_prob=0.5), Full(), False),
    ):
        site = tiny_images.party(base, tiny_images.pictures(9), structure=structure)
        start = site.initial().like(site.initial().row + 0.05)
        engine, before = Engine(base), torch.get_rng_state()
        states = []
        for round in (1, 1, 2):
            site.begin(round, 0.01)
            states.append(fit(site, engine, start))
        assert states[0].equal(states[1]) and states[1].equal(states[2]) == same
        assert torch.equal(torch.get_rng_state(), before)
        first, second = (tiny_images.answer(engine, site.logits(start, site.train)) for _ in range(2))
        assert torch.equal(first, second)


def test_a_client_whose_loss_is_not_finite_ends_alone():
    base = tiny_images.resnet(torch.float32)
    engine = Engine(base)
    sites = {id: tiny_images.party(base, tiny_images.pictures(9), id) for id in ("a", "b", "c")}
    start = sites["a"].initial()
    bad = start.like(start.row * float("nan"))
    outcomes = drive(
        {id: site.fit(bad if id == "b" else start) for id, site in sites.items()}, engine.execute
    )  # fmt: skip
    assert isinstance(outcomes["b"], ClientError)
    assert re.search(r"client b: loss is nan at local step 1 \(lr 0.001\); lower local.lr", str(outcomes["b"]))
    assert outcomes["a"].is_finite()
    alone = tiny_images.answer(Engine(base), sites["c"].fit(start))
    assert not alone.equal(outcomes["c"])  # the second fit of the round draws other batches
    sites["c"].begin(1, 1e-3)
    assert tiny_images.answer(Engine(base), sites["c"].fit(start)).equal(outcomes["c"])


def test_weights_or_statistics_that_overflow_are_an_error():
    """BatchNorm maps activations of any size to usual ones, so the loss may be finite while its variance is not."""
    base, local = tiny_images.resnet(torch.float32), LocalConfig(steps=1, optimizer="sgd")
    site = tiny_images.party(base, tiny_images.pictures(4), local=local)
    start = site.initial()
    with pytest.raises(ClientError, match="not finite after 1 local steps"):
        tiny_images.answer(Engine(base), site.fit(start.like(30 * start.row), optimizer=Optimizer(3e38, "sgd")))
    huge = start.updated(start.select("embedder.embedder.convolution") * 1e25)
    with pytest.raises(ClientError, match="not finite after 1 local steps"):
        tiny_images.answer(Engine(base), site.fit(huge, optimizer=Optimizer(1e-9, "sgd")))


def test_a_client_without_pictures_is_an_error():
    base = tiny_images.cnn()
    with pytest.raises(ClientError, match="client c0 has no training example"):
        tiny_images.answer(Engine(base), tiny_images.party(base, []).fit(State.of({})))


# LoRA


def test_statistics_under_an_adapter_are_frozen_with_the_base():
    """The state holds the adapter and the head alone, so BatchNorm keeps the base's statistics in training, too."""
    base = tiny_images.resnet()
    structure = Lora(rank=2, alpha=4, dropout=0.0, target_modules=("classifier.1",))
    site = tiny_images.party(base, BATCHES[0], structure=structure)
    engine, start = Engine(base), site.initial()
    before = {name: buffer.clone() for name, buffer in base.model.named_buffers()}
    found = fit(site, engine, start, lr=0.05)
    assert list(found) == ["classifier.1.lora_A", "classifier.1.lora_B"] and not found.extras
    wrapped = peft.get_peft_model(
        copy.deepcopy(base.model), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["classifier.1"])
    )
    with torch.no_grad():
        for name, parameter in trained_by(wrapped).items():
            parameter.copy_(start[name])
    optimizer = torch.optim.Adam(trained_by(wrapped).values(), lr=0.05)
    for batch in BATCHES:
        optimizer.zero_grad()
        cross_entropy(base, wrapped.eval(), batch).backward()
        optimizer.step()
    assert_state(found, dict(trained_by(wrapped)), 1e-10)
    assert all(torch.equal(buffer, before[name]) for name, buffer in base.model.named_buffers())
