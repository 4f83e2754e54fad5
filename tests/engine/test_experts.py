"""Several experts and a gate in one AdapterBank: against plain loops in PyTorch, on disk, and in generation."""

from dataclasses import replace

import peft
import pytest
import tiny
import tiny_base
import torch
from stock_training import by_the_formula
from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.engine import generation, inference
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.engine import Engine
from llm_fed.engine.examples import TEXT
from llm_fed.engine.fit import fit
from llm_fed.engine.packing import collate
from llm_fed.export import models, peft_folders
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Gradient, GradientMoments, MeanLosses
from llm_fed.models.lora import ANCHORS, SCALE, Lora, draw
from llm_fed.runtime.local import LocalRuntime
from llm_fed.settings.config import EvalConfig
from llm_fed.state import State

PLAIN = Lora(rank=2, alpha=6, dropout=0.0, target_modules=("q_proj", "v_proj"))
ROUTED = PLAIN.with_experts("one", "two", "three", gate="router")
MIXED = PLAIN.with_experts("global", "local", gate="mix")
MIX = (0.25, 0.75)


@pytest.fixture(scope="module")
def base():
    return tiny_base.around(tiny.build("llama", torch.float64))


def state(base, structure: Lora, seed: int) -> State:
    """A state without a zero in it: experts and routers all matter."""
    draws = torch.Generator().manual_seed(seed)
    fresh = draw(base.model, structure, draws, torch.float64)
    return fresh.like(fresh.row + 0.3 * torch.randn(fresh.row.shape, generator=draws, dtype=torch.float64))


@pytest.mark.parametrize("structure", [ROUTED, MIXED], ids=["router", "mix"])
def test_training_equals_a_plain_loop(base, structure):
    """Three clients fused against each of them alone: autograd over the formula, torch.optim.AdamW."""
    starts = [state(base, structure, k) for k in range(3)]
    batches = [[tiny.examples(10 * k + step, [5 + k, 9, 7]) for step in range(3)] for k in range(3)]
    mix = MIX if structure.gate == "mix" else None
    jobs = [tiny.fit_on(f"c{k}", structure, starts[k], batches[k], Optimizer(0.02), mix=mix) for k in range(3)]
    results, _ = fit(AdaptedModel(base.model, structure), jobs)
    for start, steps, result in zip(starts, batches, results, strict=True):
        entries = {name: nn.Parameter(value.clone()) for name, value in start.tensors().items()}
        optimizer = torch.optim.AdamW(entries.values(), lr=0.02, weight_decay=0.0)
        for examples in steps:
            optimizer.zero_grad()
            with by_the_formula(base.model, structure, entries):
                TEXT.losses(base.model, collate(examples)).mean().backward()
            optimizer.step()
        expected = State.of({name: value.data for name, value in entries.items()})
        torch.testing.assert_close(result.state.row, expected.row, rtol=0, atol=1e-10)


def test_a_router_reads_its_input_before_dropout(base):
    """Dropping the same inputs at every token is A without those columns, kept ones counting twice; the router, which
    sees all inputs, stays as it is."""
    structure, one = replace(ROUTED, dropout=0.5), state(base, ROUTED, 0)
    bank = AdapterBank(base.model, structure, 1, torch.float64)
    bank.load(0, one)
    dropped = torch.rand(bank.width, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = one.updated(one.select("lora_B$") * 2.0)
    for name, place in bank._inputs.items():
        for expert in ROUTED.experts:
            expected[f"{name}.{expert}.lora_A"][:, dropped[place]] = 0
    plain = AdapterBank(base.model, ROUTED, 1, torch.float64)
    plain.load(0, expected)
    inputs = tiny.inputs("llama", 2)["input_ids"]
    with bank.attached(torch.tensor([0, 0]), ~dropped.expand(2, 7, -1)):
        got = base.model(inputs).logits
    with plain.attached(torch.tensor([0, 0])):
        torch.testing.assert_close(got, base.model(inputs).logits, rtol=0, atol=1e-10)


def test_experts_of_gate_sum_add_up(base):
    """Two experts with the same A and half of B each are one adapter."""
    alone = state(base, PLAIN, 3)
    both = PLAIN.with_experts("a", "b", gate="sum")
    parts = [alone.renamed(".lora_", f".{name}.lora_") for name in "ab"]
    halves = [part.updated(part.select("lora_B$") * 0.5) for part in parts]
    summed = draw(base.model, both, torch.Generator(), torch.float64).updated(halves[0]).updated(halves[1])
    inputs = tiny.inputs("llama", 2)["input_ids"]
    logits = []
    for structure, one in ((PLAIN, alone), (both, summed)):
        bank = AdapterBank(base.model, structure, 1, torch.float64)
        bank.load(0, one)
        with bank.attached(torch.tensor([0, 0])):
            logits.append(base.model(inputs).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-12)


def test_features_are_the_last_hidden_state_at_the_prompts_end(base):
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
    found = inference.features(base, prompts)
    for row, prompt in zip(found, prompts, strict=True):
        hidden = base.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(row, hidden[0, -1], rtol=0, atol=1e-10)


def test_mean_losses_are_those_of_transformers(base):
    """Of two states on two lists of examples: the mean over all target tokens, whatever shares a batch."""
    states = [state(base, ROUTED, k) for k in range(2)]
    bank = AdapterBank(base.model, ROUTED, 2, torch.float64)
    for row, one in enumerate(states):
        bank.load(row, one)
    lists = [tiny.examples(0, [4, 9, 6]), tiny.examples(1, [8, 5])]
    got = inference.mean_losses(AdaptedModel(base.model, ROUTED), bank, list(enumerate(lists)))
    for one, examples, loss in zip(states, lists, got, strict=True):
        with by_the_formula(base.model, ROUTED, one.tensors()):
            alone = torch.cat([TEXT.losses(base.model, collate([example])) for example in examples])
        assert loss == pytest.approx(float(alone.mean()), abs=1e-6)


def mixed(base, scale: float, anchors: list[list[int]]) -> State:
    extras = {ANCHORS: inference.features(base, anchors), SCALE: torch.tensor(scale)}
    return State((one := state(base, MIXED, 5)).layout, one.row, extras)


def test_mixing_weights_by_hand(base):
    """alpha = scale * (cos(h(x), h(x_1)) + cos(h(x), h(x_2))) / 2, at most 1 and at least 0."""
    x, first, second = [3, 4, 5], [6, 7], [3, 9]
    h, one, two = inference.features(base, [x, first, second])
    cosine = (h @ one / (h.norm() * one.norm()) + h @ two / (h.norm() * two.norm())) / 2
    for scale, expected in ((0.5, 0.5 * float(cosine)), (100.0, float(cosine > 0)), (0.0, 0.0)):
        (weights,) = base.mixing_weights(MIXED, [(mixed(base, scale, [first, second]), x)])
        assert weights.tolist() == pytest.approx([1 - max(0, expected), max(0, expected)], abs=1e-6)


def test_losses_and_gradients_under_a_mix_follow_each_examples_own_weights(base):
    """Of a prompt that is its own anchor with scale 0.75, alpha is 0.75, which is MIX; with scale 0 it is 0, so that
    the first expert alone counts."""
    (example,) = tiny.examples(3, [7])
    one, first = (mixed(base, scale, [list(example.prompt)]) for scale in (0.75, 0.0))
    alone = first.updated(first.select(r"\.local\.lora_B$") * 0.0)
    alone = alone.updated(alone.select(r"\.global\.lora_B$") * (1 / MIX[0]))
    found = []
    for entries in (one.tensors(), alone.tensors()):
        entries = {name: nn.Parameter(value.clone()) for name, value in entries.items()}
        with by_the_formula(base.model, MIXED, entries):
            loss = TEXT.losses(base.model, collate([example])).mean()
        loss.backward()
        found.append((float(loss.detach()), State.of({name: value.grad for name, value in entries.items()})))
    engine = Engine(base, EvalConfig())
    (losses,) = engine.execute([MeanLosses("a", MIXED, [one, first], [example, example])])
    assert losses == pytest.approx([loss for loss, _ in found], abs=1e-6)
    ((loss, gradient),) = engine.execute([Gradient("a", MIXED, one, [example])])
    assert loss == pytest.approx(found[0][0], abs=1e-6)
    torch.testing.assert_close(gradient.row, found[0][1].row, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="weighs two of them by each prompt"):
        engine.execute([GradientMoments("a", MIXED, one, first, [example])])


def test_answers_and_options_under_a_mix_follow_each_prompts_own_weights(base):
    """A prompt that is its own anchor with scale 0.75 has alpha = 0.75; its anchor reversed in sign has alpha = 0."""
    prompts, options = [[5, 6, 7], [8, 9]], [[10, 11], [12]]
    one = mixed(base, 0.75, [prompts[0]])
    opposite = State(one.layout, one.row, {**one.extras, ANCHORS: -one.extras[ANCHORS]})
    runtime = LocalRuntime(Engine(base, EvalConfig(max_new_tokens=6)), 2)
    bank = runtime.engine.adapted(MIXED).bank_of([one, opposite])
    asked = [(0, prompts[0]), (1, prompts[0])]
    weights = base.mixing_weights(MIXED, [(one, prompts[0]), (opposite, prompts[0])])
    assert weights.tolist() == [pytest.approx([0.25, 0.75]), pytest.approx([1, 0])]
    texts = generation.generate(base, bank, asked, max_new_tokens=6, batch_size=2, mix=weights)
    scores = generation.option_log_likelihoods(
        base, bank, [(row, prompt, options) for row, prompt in asked], batch_size=2, mix=weights
    )
    summed = PLAIN.with_experts("global", "local", gate="sum")
    for row, mix in enumerate(weights.tolist()):
        scaled = one
        for expert, weight in zip(("global", "local"), mix, strict=True):
            scaled = scaled.updated(one.select(rf"\.{expert}\.lora_B$") * weight)
        alone = AdapterBank(base.model, summed, 1, torch.float64)
        alone.load(0, scaled)
        one_by_one = [(0, prompts[0])]
        assert generation.generate(base, alone, one_by_one, max_new_tokens=6, batch_size=1) == [texts[row]]
        expected = generation.option_log_likelihoods(base, alone, [(0, prompts[0], options)], batch_size=2)
        assert scores[row] == pytest.approx(expected[0], abs=1e-9)


@pytest.mark.parametrize("structure", [ROUTED, MIXED], ids=["router", "mix"])
def test_a_folder_per_expert_and_a_gate_come_back(base, tmp_path, structure):
    one = mixed(base, 0.5, [[3, 4]]) if structure is MIXED else state(base, ROUTED, 1)
    models.write(tmp_path / "c0", one, structure, base, "card")
    names = {path.name for path in (tmp_path / "c0").iterdir()}
    assert names == {*structure.experts, "gate.safetensors", "README.md"}
    got, found = peft_folders.read(tmp_path / "c0", base)
    assert found == structure and got.equal(one)
    assert peft_folders.read(tmp_path / "c0", base, structure)[0].equal(one)
    for expert in structure.experts:  # each is an ordinary adapter
        wrapped = peft.PeftModel.from_pretrained(tiny.build("llama", torch.float64), str(tmp_path / "c0" / expert))
        for name, parameter in wrapped.named_parameters():
            if ".default.weight" in name:
                entry = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                assert torch.equal(parameter, one[entry.replace(".lora_", f".{expert}.lora_")].to(parameter.dtype))
    models.write(tmp_path / "c0", one, structure, base, "again")  # an adapter is replaced


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: (folder / "gate.safetensors").unlink(), "gate.safetensors is absent"),
        (lambda folder: (folder / "gate.safetensors").write_bytes(b"x" * 20), "damaged"),
        (lambda folder: (folder / "two" / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    ],
)
def test_a_damaged_gate_is_refused(base, tmp_path, damage, word):
    models.write(tmp_path / "c0", state(base, ROUTED, 1), ROUTED, base, "card")
    damage(tmp_path / "c0")
    with pytest.raises(UserError, match=word):
        peft_folders.read(tmp_path / "c0", base, ROUTED)


def test_other_experts_than_expected_are_refused(base, tmp_path):
    models.write(tmp_path / "c0", state(base, ROUTED, 1), ROUTED, base, "card")
    with pytest.raises(UserError, match="one, two, three"):
        peft_folders.read(tmp_path / "c0", base, MIXED)
