"""DP-SGD in the bank against a loop over single examples through stock PEFT, and what it must not depend on."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
import toy
from stock_training import fitted

from llm_fed.basics.rng import generator
from llm_fed.engine.engine import Engine
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Fitted, PerExample
from llm_fed.models.lora import Lora, draw
from llm_fed.state import State
from llm_fed.tasks.common import Encoded

NOISE, SIZE = 0.2, 3
CLIP = {"llama": 4.0, "gpt2": 0.9}  # some gradients are longer, and some are not
SILENT = Encoded([3, 4, 5], [False] * 3)  # no token counts in the loss


def job(model, structure: Lora, client: int, noise: float = NOISE, **options) -> Fit:
    """Batches of 3, 0, 1 and 5 examples, one of which has no target."""
    draws = generator(5, client)
    start = draw(model, structure, draws, torch.float64)
    start = start.like(start.row + 0.1 * torch.randn(start.row.shape, dtype=torch.float64, generator=draws))
    batches = [tiny.examples(10 * client + n, [5 + n + i for i in range(n)]) for n in (3, 0, 1, 4)]
    batches[3].append(SILENT)
    private = PerExample(CLIP[model.config.model_type], noise, SIZE, toy.secret(client))
    optimizer = options.pop("optimizer", Optimizer(0.05, "sgd"))
    return tiny.fit_on(f"c{client}", structure, start, batches, optimizer, seed=client, private=private, **options)


def by_hand(model, structure: Lora, job: Fit, train: str = "") -> tuple[State, list[float]]:
    """One example after another: its gradient, clipped; their sum with noise, divided by the size; a step of SGD. Also
    the factors by which gradients were clipped."""
    wrapped = tiny.stock_peft(model, structure, job.start).eval()
    entries = tiny.peft_entries(wrapped)
    trained = {name: entry for name, entry in entries.items() if name.endswith(train)}
    factors = []
    for step, batch in enumerate(job.batches):
        total = {name: torch.zeros_like(entry) for name, entry in trained.items()}
        for example in (job.examples[place] for place in batch):
            wrapped.zero_grad()
            target = torch.tensor(example.target)[1:]
            if not target.any():
                continue
            ids = torch.tensor([example.input_ids])
            logits = wrapped(input_ids=ids).logits[0, :-1][target].float()
            torch.nn.functional.cross_entropy(logits, ids[0, 1:][target]).backward()
            norm = math.sqrt(sum(float(entry.grad.square().sum()) for entry in trained.values()))
            factors.append(min(1.0, job.private.clip / norm))
            for name, entry in trained.items():
                total[name] += factors[-1] * entry.grad
        noise = job.private.secret.gaussians(sum(e.numel() for e in trained.values()), step)
        place = 0
        with torch.no_grad():
            for name in (name for name in job.start if name in trained):
                entry = trained[name]
                drawn = noise[place : place + entry.numel()].view(entry.shape)
                place += entry.numel()
                gradient = (total[name] + job.private.noise * job.private.clip * drawn) / job.private.size
                entry -= job.optimizer.lr * gradient
    return State.of({name: entries[name].detach() for name in job.start}), factors


@pytest.mark.parametrize("train", ["", "lora_B"])
@pytest.mark.parametrize("budget", [None, 12])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_step_is_that_of_single_examples(kind, budget, train):
    """The norm that counts is that of what is trained."""
    model, structure = tiny.build(kind, torch.float64), tiny.structure_of(kind)
    given = job(model, structure, 1, train=train or ".*")
    expected, factors = by_hand(model, structure, given, train)
    assert len(factors) == 8 and min(factors) < 0.95 and max(factors) == 1
    (found,) = fitted(model, structure, [given], budget=budget)
    torch.testing.assert_close(found.state.row, expected.row, rtol=0, atol=1e-10)


def test_each_client_gets_what_it_would_get_alone():
    """Though the others train other entries, so that the bank has more gradients than a client's norm counts. With
    dropout, AdamW and clipping of the noisy gradient."""
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama", dropout=0.3)
    optimizer = Optimizer(0.01, "adamw", weight_decay=0.1, clip=1.0, proximal=0.1)
    jobs = [
        job(model, structure, k, optimizer=optimizer, train=train) for k, train in enumerate([".*", r"_B$", r"_A$"])
    ]
    together = fitted(model, structure, jobs)
    for k, one in enumerate(jobs):
        (alone,) = fitted(model, structure, [one], budget=10)
        torch.testing.assert_close(together[k].state.row, alone.state.row, rtol=0, atol=1e-10)
        assert together[k].losses == pytest.approx(alone.losses, rel=1e-6)
        still = one.start.row == together[k].state.row
        assert bool(still.any()) == (k > 0) and not still.all()


def test_one_example_moves_the_sum_by_no_more_than_the_bound():
    """With lr 1 and size 1 the model moves by the sum: without an example by its clipped gradient less."""
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    start = job(model, structure, 0).start
    examples = tiny.examples(3, [5, 9, 14, 7])

    def moved(batch: list[int], clip: float) -> torch.Tensor:
        private = PerExample(clip, 0.0, 1, toy.secret())
        one = Fit("c", structure, start, examples, [batch], Optimizer(1.0, "sgd"), private=private)
        return fitted(model, structure, [one])[0].state.row

    for clip in (0.05, 0.4):
        for left in range(4):
            gap = moved([0, 1, 2, 3], clip) - moved([n for n in range(4) if n != left], clip)
            assert float(gap.norm()) == pytest.approx(clip, rel=1e-9)  # all gradients are longer
    gap = moved([0, 1, 2, 3], 1e6) - moved([0, 1, 2], 1e6)
    assert 0.4 < float(gap.norm()) < 1e6


def test_a_step_without_an_example_is_noise_of_the_right_size():
    """3 * 0.5 / 4 on each number, another draw for each step and seed; its loss is not reported."""
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    start = job(model, structure, 0).start

    def noise(seed: int, steps: int = 1) -> Fitted:
        private = PerExample(0.5, 3.0, 4, toy.secret(seed))
        empty: list[list[int]] = [[]] * steps
        return fitted(
            model, structure, [Fit("c", structure, start, [], empty, Optimizer(1.0, "sgd"), private=private)]
        )[0]

    one, other, two = noise(0).state.row - start.row, noise(1).state.row - start.row, noise(0, 2).state.row - start.row
    assert noise(0).losses == ()
    for drawn in (one, other, two - one):
        assert abs(float(drawn.mean())) < 4 * 0.375 / math.sqrt(len(drawn))
        assert float(drawn.std()) == pytest.approx(0.375, rel=4 / math.sqrt(2 * len(drawn)))
    for second in (other, two - one):
        assert abs(float(torch.corrcoef(torch.stack([one, second]))[0, 1])) < 4 / math.sqrt(len(one))
    assert torch.equal(noise(0).state.row - start.row, one)


def test_losses_are_means_over_the_examples_of_a_batch():
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    given = job(model, structure, 1, optimizer=Optimizer(0.0, "sgd"))
    (found,) = fitted(model, structure, [given])
    expected = []
    for batch in given.batches:
        alone = [tiny.fit_on("c", structure, given.start, [[given.examples[n]]], given.optimizer) for n in batch]
        losses = [one.losses[0] for one in (fitted(model, structure, [job])[0] for job in alone if known(job))]
        expected += [sum(losses) / len(batch)] if batch else []
    assert found.losses == pytest.approx(expected, rel=1e-6)


def known(job: Fit) -> bool:
    return any(job.examples[0].target)


def test_noisy_and_plain_fits_do_not_train_together():
    model, structure = tiny.build("llama", torch.float64), tiny.structure_of("llama")
    jobs = [job(model, structure, k) for k in range(2)]
    with pytest.raises(ValueError, match="one pass"):
        Engine.fit(None, [jobs[0], replace(jobs[1], private=None)])  # type: ignore[arg-type]
