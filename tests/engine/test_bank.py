"""The bank against stock PEFT on the same base: structure, forward, gradients, and what it leaves behind."""

import copy

import peft
import pytest
import tiny
import torch
from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdapterBank
from llm_fed.models.lora import Lora, draw, layout, targets
from llm_fed.settings.config import AdapterConfig
from llm_fed.state import State

DOUBLE = torch.float64
VIT = r".*\.(q_proj|query|v_proj|value)"  # the names differ between versions of transformers


def structure_of(kind: str, dropout: float = 0.0) -> Lora:
    return Lora(rank=3, alpha=5, dropout=dropout, target_modules=VIT if kind == "vit" else tiny.TARGETS[kind])


def random_states(model, structure: Lora, count: int, dtype=DOUBLE) -> list[State]:
    """Adapters whose B is not zero either."""
    places = layout(model, structure)
    draws = generator(1, "states")
    return [State(places, 0.1 * torch.randn(places.size, dtype=dtype, generator=draws)) for _ in range(count)]


def bank_of(model, structure: Lora, states: list[State], **options) -> AdapterBank:
    bank = AdapterBank(model, structure, len(states), states[0].row.dtype, **options)
    for k, state in enumerate(states):
        bank.load(k, state)
    return bank


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "vit"])
@pytest.mark.parametrize("index", [[2, 0, 2, 1], [1, 1, 1, 1]], ids=["mixed", "shared"])
def test_each_row_is_stock_peft_with_its_own_adapter(kind, index):
    """Forward and gradients of row n equal those of a PEFT model that holds adapter index[n] alone (float64)."""
    model, structure = tiny.build(kind, DOUBLE), structure_of(kind)
    states = random_states(model, structure, 3)
    inputs = tiny.inputs(kind, len(index), DOUBLE)
    bank = bank_of(model, structure, states)
    plain = model(**inputs).logits
    with bank.attached(torch.tensor(index)):
        logits = model(**inputs).logits
        logits.square().sum().backward()
    for k, state in enumerate(states):
        rows = [n for n, owner in enumerate(index) if owner == k]
        if not rows:
            assert not bank.grads[k].any()
            continue
        stock = tiny.stock_peft(model, structure, state)
        expected = stock(**{name: value[rows] for name, value in inputs.items()}).logits
        expected.square().sum().backward()
        gradient = State.of({name: p.grad for name, p in tiny.peft_entries(stock).items() if p.grad is not None})
        assert gradient.layout == bank.layout
        assert (logits[rows] - plain[rows]).abs().max() > 1e-3  # the adapters matter
        torch.testing.assert_close(logits[rows], expected, rtol=0, atol=1e-11)
        torch.testing.assert_close(bank.grads[k], gradient.row, rtol=1e-10, atol=1e-11)
    assert torch.equal(model(**inputs).logits, plain)


def test_gradients_add_up_and_respect_train():
    model, structure = tiny.build("llama", DOUBLE), structure_of("llama")
    states = random_states(model, structure, 2)
    everything, only_b = (bank_of(model, structure, states), bank_of(model, structure, states, train=r"lora_B$"))
    for bank, times in ((everything, 1), (only_b, 2)):
        for _ in range(times):
            with bank.attached(torch.tensor([0, 1])):
                model(**tiny.inputs("llama", 2)).logits.square().sum().backward()
    for name, place in everything.layout.slices.items():
        wanted = 2 * everything.grads[:, place] if name.endswith("lora_B") else 0 * everything.grads[:, place]
        assert everything.grads[:, place].any()
        torch.testing.assert_close(only_b.grads[:, place], wanted)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6), (4, 2, 3, 6)])
def test_dropout_keeps_and_scales_by_its_masks(shape):
    """y + s B A (x * mask / kept share) in both layers, against the formula row by row; any number of dimensions."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(DOUBLE)
    structure = Lora(rank=2, alpha=3, dropout=0.25, target_modules=("0", "1"))
    states = random_states(model, structure, 3)
    bank = bank_of(model, structure, states)
    x = torch.randn(shape, dtype=DOUBLE, generator=generator(0))
    tokens = x[0].numel() // 6
    masks = bank.draw_masks([10, 11, 12, 13], [tokens + 2] * 4)  # a layer may see fewer tokens than others
    assert masks is not None and masks.shape == (4, tokens + 2, 11) and masks.any() and not masks.all()
    with bank.attached(torch.tensor([0, 1, 1, 2]), masks):
        y = model(x)
    for n, k in enumerate([0, 1, 1, 2]):
        expected = x[n].view(tokens, 6)
        for layer, inputs in enumerate((slice(0, 6), slice(6, 11))):
            dropped = expected * masks[n, :tokens, inputs] / 0.75
            update = dropped @ states[k][f"{layer}.lora_A"].T @ states[k][f"{layer}.lora_B"].T
            expected = model[layer](expected) + 1.5 * update
        torch.testing.assert_close(y[n], expected.view(y[n].shape))


def test_dropout_masks_depend_on_their_own_seed_and_length_alone():
    model = tiny.build("llama")
    bank = AdapterBank(model, structure_of("llama", dropout=0.1), 1)
    together = bank.draw_masks([5, 6, 5], [40, 50, 60])
    alone = bank.draw_masks([6], [50])
    assert together is not None and alone is not None
    assert torch.equal(together[1, :50], alone[0])
    assert not together[0, 40:].any()
    first, second = together[0, :40], together[1, :40]
    assert abs(first.double().mean() - 0.9) < 0.01  # 40 * 176 draws: deviation 0.0036
    assert abs((first & second).double().mean() - 0.81) < 0.015  # independent of each other
    layers = list(bank._inputs.values())
    assert abs((first[:, layers[0]] & first[:, layers[1]]).double().mean() - 0.81) < 0.04
    for negligible in (0.0, 1e-6):
        assert AdapterBank(model, structure_of("llama", negligible), 1).draw_masks([5], [4]) is None


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_base_with_float32_adapters_is_like_peft(autocast):
    """bfloat16 base: the output stays bfloat16; one rounding less than PEFT under autocast, hence the tolerance."""
    model, structure = tiny.build("llama", torch.bfloat16), structure_of("llama")
    states = random_states(model, structure, 2, torch.float32)
    inputs = tiny.inputs("llama", 2)
    with bank_of(model, structure, states).attached(torch.tensor([1, 0])), tiny.bfloat16(autocast):
        hidden = model.model.layers[0].self_attn.v_proj(torch.ones(2, 3, 24, dtype=torch.bfloat16))
        logits = model(**inputs).logits
    assert hidden.dtype == logits.dtype == torch.bfloat16
    for n, k in enumerate([1, 0]):
        stock = tiny.stock_peft(model, structure, states[k])
        with tiny.bfloat16(autocast):
            expected = stock(input_ids=inputs["input_ids"][n : n + 1]).logits
        spread = expected.float().std()
        assert (logits[n] - expected[0]).float().abs().max() < 0.05 * spread


@pytest.mark.parametrize("names", [("q_proj", "v_proj"), ("layers.1.mlp.up_proj",), r".*\.1\..*_proj", "all-linear"])
def test_targets_layout_and_draw_are_pefts(names):
    model = tiny.build("llama")
    structure = Lora(rank=4, alpha=8, dropout=0.0, target_modules=names)
    state = draw(model, structure, generator(0, "start"))
    wanted = names if isinstance(names, str) else list(names)
    stock = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, lora_alpha=8, target_modules=wanted))
    entries = tiny.peft_entries(stock)
    assert {name: tuple(p.shape) for name, p in entries.items()} == state.layout.shape_of
    for name, parameter in entries.items():
        if name.endswith("lora_B"):
            assert not state[name].any()
        else:
            bound = state[name].shape[1] ** -0.5
            assert 0.8 * bound < state[name].abs().max() < bound
            assert state[name].std() == pytest.approx(parameter.std().item(), rel=0.3)
    assert state.equal(draw(model, structure, generator(0, "start")))
    assert not state.equal(draw(model, structure, generator(1, "start")))


def test_load_copies():
    model, structure = tiny.build("gpt2"), structure_of("gpt2")
    first, second = random_states(model, structure, 2, torch.float32)
    bank = bank_of(model, structure, [first, second])
    assert torch.equal(bank.rows, torch.stack([first.row, second.row]))
    first.row.zero_()
    assert bank.rows[0].any()
    with pytest.raises(ValueError, match="row 1"):
        bank.load(1, first.select("lora_A"))


def test_nothing_is_left_on_the_base_also_after_an_exception():
    model, structure = tiny.build("llama"), structure_of("llama")
    bank = AdapterBank(model.train(), structure, 2)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    with bank.attached(torch.tensor([0])):
        assert any(module._forward_hooks for module in model.modules())
        with pytest.raises(RuntimeError, match="attached already"), bank.attached(torch.tensor([1])):
            pass
        with pytest.raises(UserError, match="given 2 rows"):
            model(**tiny.inputs("llama", 2))
    with pytest.raises(KeyboardInterrupt), bank.attached(torch.tensor([0])):
        raise KeyboardInterrupt
    with pytest.raises(IndexError), bank.attached(torch.tensor([2])):  # there are two adapters
        pass
    assert not any(module._forward_hooks for module in model.modules())
    with bank.attached(torch.tensor([0])):
        model(**tiny.inputs("llama", 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "adapter.rank is 0; it must be at least 1"),
        ({"alpha": -1}, "adapter.alpha is -1.0; it must be above 0 and finite"),
        ({"dropout": 1.0}, "adapter.dropout is 1.0"),
        ({"target_modules": ()}, r"adapter.target_modules is \(\); it must be at least one module name"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        Lora.from_config(AdapterConfig(**changes))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("query",), "matches no layer of LlamaForCausalLM; it has linear layers named q_proj"),
        (("proj",), "matches no layer"),  # a name's last parts are whole words
        ("q_proj", "matches no layer"),  # a string is a full regular expression, as in PEFT
        (("self_attn",), "matches model.layers.0.self_attn, a LlamaAttention; only linear layers"),
        ("(", "is not a valid regular expression"),
    ],
)
def test_bad_targets_are_named(names, message):
    with pytest.raises(UserError, match=message):
        targets(tiny.build("llama"), Lora(rank=1, alpha=1, dropout=0, target_modules=names))


class Blocks(nn.Linear):
    """Multiplies each half of its inputs (..., 2, in) by one half of its weight, as DeepSeek 4 does."""

    def forward(self, x):
        return torch.einsum("...gi,goi->...go", x, self.weight.view(2, -1, self.in_features))


def test_a_layer_that_multiplies_in_blocks_is_refused_by_name():
    model = nn.ModuleDict({"o_a_proj": Blocks(4, 6, bias=False)})
    bank = AdapterBank(model, Lora(2, 2, 0.0, ("o_a_proj",)), 1)
    message = "o_a_proj cannot have an adapter: it makes 3 numbers of 4 for each token, where its weight makes 6 of 4"
    with bank.attached(torch.tensor([0])), pytest.raises(UserError, match=message):
        model["o_a_proj"](torch.ones(1, 5, 2, 4))
    assert model["o_a_proj"](torch.ones(1, 5, 2, 4)).shape == (1, 5, 2, 3)


def test_rslora_divides_by_the_root_of_the_rank():
    """So that gradients keep their size as the rank grows; of rank 1 both are the same."""
    scales = [Lora.from_config(AdapterConfig(rank=r, alpha=8, rslora=True)).scaling for r in (1, 4, 16)]
    assert scales == [8, 4, 2]
    assert Lora.from_config(AdapterConfig(rank=16, alpha=8)).scaling == 0.5
