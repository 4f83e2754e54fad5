"""Adapters on the experts of a mixture, as PEFT has them by `target_parameters`: training, answers, folders and folded
weights, against stock PEFT."""

import copy
import json
from contextlib import contextmanager

import peft
import pytest
import tiny
import tiny_base
import torch
from mixtures import FAMILIES, PROMPTS, build, states
from torch import nn

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.engine import generation
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.fit import fit
from llm_fed.export import gguf_files, models, peft_folders, serving
from llm_fed.export.folding import fold
from llm_fed.export.personal import alone
from llm_fed.method.optimizer import Optimizer
from llm_fed.models.lora import Lora, draw, layout, targets
from llm_fed.models.prompt import stop_tokens
from llm_fed.settings.config import AdapterConfig

BOTH = ("experts.down_proj", "experts.gate_up_proj")
EXPERTS = Lora(2, 4, 0.0, ("q_proj",), parameters=BOTH)


def built(family: str):
    return build(family, torch.float64)


def stock(folder, model) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder), is_trainable=True).eval()


@contextmanager
def attached(model, structure, state, rows):
    bank = AdapterBank(model, structure, 1, state.row.dtype)
    bank.load(0, state)
    with bank.attached(torch.tensor([0] * rows)):
        yield bank


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
@pytest.mark.parametrize("chosen", [BOTH, BOTH[1:], BOTH[:1]], ids=["both", "gate_up", "down"])
def test_a_block_computes_what_stock_peft_computes(family, chosen, tmp_path):
    """The block of the first layer by itself, as norms round to float32: outputs and gradients."""
    model, structure = built(family), Lora(2, 4, 0.0, ("q_proj",), parameters=chosen)
    state = states(model, structure, torch.float64)[0]
    models.write(tmp_path / "a", state, structure, tiny_base.around(model), "card")
    theirs = stock(tmp_path / "a", model)
    x = torch.randn(3, 5, model.config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours_in, theirs_in = x.clone().requires_grad_(), x.clone().requires_grad_()
    block = theirs.base_model.model.model.layers[0].mlp
    expected = block(theirs_in)
    expected = expected[0] if isinstance(expected, tuple) else expected
    (expected**2).sum().backward()
    with attached(model, structure, state, 3) as bank:
        got = model.model.layers[0].mlp(ours_in)
        got = got[0] if isinstance(got, tuple) else got
        (got**2).sum().backward()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, rtol=0, atol=1e-10)
    for parameter in theirs.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    gradients, _ = peft_folders.read(tmp_path / "gradients", tiny_base.around(model))
    names = [name for name in gradients if name.startswith("model.layers.0.mlp")]
    ours = state.like(bank.grads[0])
    assert names and all(float(ours[name].abs().max()) > 0 for name in names if name.endswith("lora_A"))
    for name in names:
        torch.testing.assert_close(ours[name], gradients[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("device", "autocast", "within"),
    [
        ("cpu", None, 1e-4),
        pytest.param(
            "cuda", torch.bfloat16, 0.05,
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        ),
    ],
)  # fmt: skip
def test_grouped_products_are_those_of_each_expert(device, autocast, within):
    """The gradients of two clients, by torch's grouped products and in float64, where each has a product of its own."""
    gradients = []
    for dtype, place in ((torch.float64, "cpu"), (torch.float32, device)):
        model = build("qwen3_moe", dtype).to(place)
        bank = AdapterBank(model, EXPERTS, 2, dtype)
        for k, state in enumerate(states(model, EXPERTS, torch.float64)):
            bank.load(k, state.like(state.row.to(place, dtype)))
        kind = autocast if dtype == torch.float32 else None
        ids = torch.arange(3, 21, device=place).view(3, 6)
        with bank.attached(torch.tensor([0, 1, 0])), torch.autocast(place, kind, enabled=kind is not None):
            (model(input_ids=ids).logits ** 2).sum().backward()
        gradients.append(bank.grads.double().cpu())
    exact, got = gradients
    assert float((got - exact).norm()) < within * float(exact.norm())


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_two_clients_train_as_each_alone_and_as_stock_peft(family, tmp_path):
    model = built(family)
    base, starts = tiny_base.around(model), states(model, EXPERTS, torch.float64)
    batches = [[tiny.examples(10 * k + step, [5 + k, 9, 7]) for step in range(2)] for k in range(2)]
    jobs = [tiny.fit_on(f"c{k}", EXPERTS, starts[k], batches[k], Optimizer(0.01)) for k in range(2)]
    results, _ = fit(AdaptedModel(model, EXPERTS), jobs)
    for number, (job, steps, result) in enumerate(zip(jobs, batches, results, strict=True)):
        (by_itself,), _ = fit(AdaptedModel(model, EXPERTS), [job])
        torch.testing.assert_close(result.state.row, by_itself.state.row, rtol=0, atol=1e-10)
        models.write(tmp_path / str(number), job.start, EXPERTS, base, "card")
        theirs = stock(tmp_path / str(number), model)
        optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
        for examples in steps:
            optimizer.zero_grad()
            losses = []
            for example in examples:
                places = [place for place, counts in enumerate(example.target) if counts]
                logits = theirs(input_ids=torch.tensor([example.input_ids])).logits[0, [p - 1 for p in places]]
                labels = torch.tensor([example.input_ids[place] for place in places])
                losses.append(nn.functional.cross_entropy(logits, labels, reduction="none"))
            torch.cat(losses).mean().backward()
            optimizer.step()
        theirs.save_pretrained(tmp_path / f"{number}-after")
        expected, structure = peft_folders.read(tmp_path / f"{number}-after", base, EXPERTS)
        assert structure == EXPERTS
        assert float((result.state.row - job.start.row).abs().max()) > 0.01
        torch.testing.assert_close(result.state.row, expected.row, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_answers_and_folded_weights_are_those_of_stock_peft(family, tmp_path):
    model = built(family).float()
    base, of_clients = tiny_base.around(model), states(model, EXPERTS, torch.float32)
    bank = AdapterBank(model, EXPERTS, 2, torch.float32)
    for k, state in enumerate(of_clients):
        bank.load(k, state)
        models.write(tmp_path / str(k), state, EXPERTS, base, "card")
    got = generation.generate(base, bank, PROMPTS, max_new_tokens=6, batch_size=8)
    for answer, (k, prompt) in zip(got, PROMPTS, strict=True):
        theirs, tokens = stock(tmp_path / str(k), model), list(prompt)
        for _ in range(6):
            token = int(theirs(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            if token in stop_tokens(base):
                break
            tokens.append(token)
        assert answer == base.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
    folded, theirs = copy.deepcopy(model), stock(tmp_path / "0", model)
    fold(folded, EXPERTS, of_clients[0], tmp_path)
    ids = torch.tensor([PROMPTS[2][1]])
    assert not torch.allclose(folded(ids).logits, model(ids).logits, atol=1e-3)
    torch.testing.assert_close(folded(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)


def test_a_folder_of_stock_peft_is_read_with_experts_alone(tmp_path):
    model = build("mixtral", torch.float32)
    made = peft.LoraConfig(r=2, lora_alpha=4, target_parameters=["gate_up_proj"], target_modules=[])
    peft.get_peft_model(copy.deepcopy(model), made).save_pretrained(tmp_path / "a")
    state, structure = peft_folders.read(tmp_path / "a", tiny_base.around(model))
    assert structure == Lora(2, 4, 0.0, (), parameters=("gate_up_proj",))
    assert set(state) == set(layout(model, structure).names) and len(state) == 2 * 4 * 2
    assert Lora.from_config(structure.as_config()) == structure


def test_each_experts_factors_are_drawn_as_peft_draws_them():
    """A uniform within 1 / sqrt(in), B zero, so that the model is the base."""
    model = build("mixtral", torch.float32)
    state = draw(model, EXPERTS, torch.Generator().manual_seed(0))
    a, b = (state[f"model.layers.0.mlp.experts.down_proj.3.lora_{factor}"] for factor in "AB")
    assert a.shape == (2, 40) and b.shape == (24, 2) and not b.any()
    assert 0.5 * 40**-0.5 < float(a.abs().max()) <= 40**-0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_what_peft_would_move_to_other_layers_is_refused(family):
    """PEFT takes these names for the experts and the router, too."""
    for chosen in ("all-linear", ("gate",)):
        with pytest.raises(UserError, match=r"mixture of experts|only linear layers"):
            targets(build(family, torch.float32), Lora(2, 4, 0.0, chosen))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_parameters": ("experts.w1",)}, r"'experts.w1', but no parameter.*experts.down_proj, experts.gate_up"),
        ({"target_parameters": ("gate.weight",)}, r"which is model.layers.0.mlp.gate.weight; only.*experts.down_proj"),
        ({"target_parameters": BOTH, "dropout": 0.1}, "set adapter.dropout=0"),
        ({"target_parameters": BOTH, "dora": True}, "adapter.dora=false"),
        ({"target_modules": ()}, "at least one module name"),
    ],
)
def test_what_peft_cannot_adapt_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        layout(build("mixtral", torch.float32), Lora.from_config(AdapterConfig(**{"dropout": 0.0, **settings})))


def test_a_base_without_experts_says_so():
    with pytest.raises(UserError, match="this base has no fused experts"):
        layout(tiny.build("llama", torch.float32), EXPERTS)


@pytest.mark.parametrize("name", ["pfedmoe", "feddpa", "fedem", "flora", "fedex-lora"])
def test_methods_of_several_adapters_refuse_experts(name):
    settings = methods.build({"name": name})
    with pytest.raises(UserError, match="leave out adapter.target_parameters"):
        settings.wrap(EXPERTS, None)


def test_what_serves_and_what_does_not(tmp_path):
    model = build("mixtral", torch.float32)
    base, state = tiny_base.around(model), states(model, EXPERTS, torch.float32)[0]
    models.write(tmp_path / "a", state, EXPERTS, base, "card")
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_parameters"] == list(BOTH)
    assert "target_parameters" in serving.line([tmp_path / "a"])
    with pytest.raises(UserError, match="give --merged --gguf"):
        gguf_files.adapter(tmp_path / "a", base)


def test_a_mixture_answers_without_an_adapter():
    """As `llm-fed chat --base` makes it."""
    base = tiny_base.around(build("qwen3_moe", torch.float32))
    assert alone(base).structure.target_modules == ("q_proj", "v_proj")
