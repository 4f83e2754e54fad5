"""Steps of many clients together against plain torch, one client after another: bit for bit the same."""

import pytest
import torch
from torch import nn

from llm_fed.basics.rng import Secret, generator
from llm_fed.engine.steps import Steps, together
from llm_fed.method.optimizer import Optimizer, Tail
from llm_fed.method.requests import Fit, PerExample
from llm_fed.models.lora import Lora
from llm_fed.state import State

LORA = Lora(rank=3, alpha=6, dropout=0.0, target_modules=("q",))
NAMES = ("q.lora_A", "q.lora_B", "v.lora_A", "v.lora_B")
LENGTHS = (6, 2, 6, 4, 1)  # steps of each client
TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def drawn(dtype: torch.dtype, *of: object) -> State:
    """Sizes that no vector width divides."""
    draws = generator(0, *map(str, of))
    shapes = [(3, 21), (37, 3), (3, 21), (5, 3)]
    return State.of({n: torch.randn(s, dtype=dtype, generator=draws) for n, s in zip(NAMES, shapes, strict=True)})


def fits(dtype: torch.dtype, own: bool = False, train: str = ".*", **settings) -> list[Fit]:
    """Five clients; with `own` each has an anchor and a correction of its own."""
    made = []
    for k, steps in enumerate(LENGTHS):
        terms = {"anchor": drawn(dtype, "anchor", k), "correction": drawn(dtype, "correction", k)} if own else {}
        optimizer = Optimizer(0.01, **settings, **terms)
        made.append(Fit(f"c{k}", LORA, drawn(dtype, k), [], [[0]] * steps, optimizer, train=train))
    return made


def stepped(jobs: list[Fit], groups: list[list[int]]) -> torch.Tensor:
    """The rows after all steps with gradients that are drawn."""
    values, layout = torch.stack([job.start.row for job in jobs]), jobs[0].start.layout
    grads = torch.zeros_like(values)
    steps = [Steps({k: jobs[k] for k in group}, values, grads, layout) for group in groups]
    for step in range(max(LENGTHS)):
        active = [k for k, job in enumerate(jobs) if step < len(job.batches)]
        for k in active:
            grads[k] = drawn(values.dtype, "gradient", k, step).row
        for each in steps:
            each.step(active)
    return values


def alone(job: Fit, k: int) -> torch.Tensor:
    """One client as anyone would write it, with one parameter for each part of the row."""
    settings, layout, row = job.optimizer, job.start.layout, job.start.row.clone()
    places = layout.joined(layout.matching(job.train))
    parameters = [nn.Parameter(row[place]) for place in places]
    options = {"momentum": settings.momentum} if settings.name == "sgd" else {"fused": True}
    optimizer = TORCH[settings.name](parameters, weight_decay=settings.weight_decay, **options)
    anchor, correction = settings.anchor or job.start, settings.correction
    for step in range(len(job.batches)):
        gradient = drawn(row.dtype, "gradient", k, step).row
        for place, parameter in zip(places, parameters, strict=True):
            parameter.grad = gradient[place].clone()
            if settings.proximal:
                parameter.grad.add_(parameter.detach() - anchor.row[place], alpha=2 * settings.proximal)
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(parameters, settings.clip)
        for place, parameter in zip(places, parameters, strict=True):
            if correction is not None:
                parameter.grad.add_(correction.row[place])
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * settings.factor(step, len(job.batches))
        optimizer.step()
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("train", [".*", "lora_B"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1, "clip": 2.0},
        {"proximal": 0.3, "clip": 2.0, "own": True},
        {"decay": "linear"},
        {"decay": "cosine", "warmup": 2, "weight_decay": 0.1},
        {"warmup": 3},
        {"name": "adam", "weight_decay": 0.1, "own": True},
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1, "clip": 2.0, "own": True},
    ],
    ids=str,
)
def test_together_is_alone_bit_for_bit(settings, train, dtype):
    """Of clients with unequal numbers of steps."""
    jobs = fits(dtype, train=train, **settings)
    groups = together(jobs)
    assert groups == ([[0, 1, 2, 3, 4]] if "decay" not in settings else [[0, 2], [1], [3], [4]])
    rows = stepped(jobs, groups)
    for k, job in enumerate(jobs):
        expected = alone(job, k)
        assert torch.equal(rows[k], expected) and not torch.equal(expected, job.start.row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("settings", [{"tail": Tail(0.1, 1)}, {"lr_of": {"lora_B": 0.1}}, {"frozen": "v"}], ids=str)
def test_other_settings_together_are_those_alone(settings, dtype):
    jobs = fits(dtype, **settings)
    rows = stepped(jobs, together(jobs))
    apart = stepped(jobs, [[k] for k in range(len(jobs))])
    plain = stepped(fits(dtype), [[0, 1, 2, 3, 4]])
    assert torch.equal(rows, apart) and not torch.equal(rows, plain)


def test_examples_are_clipped_and_noised_each_clients_own():
    """As if each client were alone, with sizes and seeds of its own; an example of a stranger is left out."""
    jobs = [
        Fit(f"c{k}", LORA, drawn(torch.float32, k), [], [[0]], Optimizer(0.1), private=private)
        for k, private in enumerate(PerExample(0.5, 0.3, size, Secret.fresh()) for size in (2, 3, 4))
    ]
    layout, owners = jobs[0].start.layout, [2, 0, 7, 2, 0]
    each = torch.stack([drawn(torch.float32, "example", n).row for n in range(5)])

    def found(groups: list[list[int]]) -> torch.Tensor:
        values, grads = torch.stack([job.start.row for job in jobs]), torch.zeros(3, layout.size)
        for group in groups:
            steps = Steps({k: jobs[k] for k in group}, values, grads, layout)
            steps.add_clipped(each, owners)
            steps.step(range(3))
        return grads

    assert torch.equal(found([[0, 1, 2]]), found([[0], [1], [2]]))
    noise = jobs[0].private.secret.gaussians(layout.size, 0).float()
    clipped = sum(example * (0.5 / example.norm()) for example in each[[1, 4]])
    torch.testing.assert_close(found([[0, 1, 2]])[0], (clipped + 0.15 * noise) / 2)


def test_what_differs_is_stepped_apart():
    """In the order of the clients; anchors and corrections are each client's own."""
    settings = [{}, {"clip": 1.0}, {}, {"lr_of": {"lora_A": 0.1}}, {"proximal": 1.0}, {"lr_of": {"lora_A": 0.1}}]
    start = drawn(torch.float32)
    jobs = [Fit("", LORA, start, [], [[0]], Optimizer(0.1, **each)) for each in settings]
    jobs += [
        Fit("", LORA, start, [], [[0]], Optimizer(0.1, proximal=1.0, anchor=start)),
        Fit("", LORA, start, [], [[0]], Optimizer(0.1, correction=start)),
        Fit("", LORA, start, [], [[0], [0]], Optimizer(0.1), train="lora_A"),
    ]
    assert together(jobs) == [[0, 2], [1], [3, 5], [4, 6], [7], [8]]
