"""`local.keep_optimizer`: what an optimizer remembers goes from one fit to the next, and from round to round."""

from dataclasses import replace

import pytest
import tiny
import tiny_images
import torch
import toy
from equal_runs import StopsAfter
from rich.console import Console
from stock_training import cohort, fitted
from tiny_images import BATCHES

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.engine import Engine
from llm_fed.experiment import run
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Fitted
from llm_fed.method.site import OPTIMIZER
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Full
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile

STRUCTURE = Lora(rank=3, alpha=6, dropout=0.0, target_modules=tiny.TARGETS["llama"])


def halves(job: Fit) -> tuple[Fit, Fit]:
    middle = len(job.batches) // 2
    return replace(job, batches=job.batches[:middle], moments={}), replace(job, batches=job.batches[middle:])


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "adamw", "weight_decay": 0.1},
        {"name": "adam", "frozen": r"layers\.0\..*lora_A"},
        {"name": "sgd", "momentum": 0.9},
        {"name": "adamw", "lr_of": {r"lora_B$": 0.003}},
    ],
)
def test_two_fits_are_one(settings):
    """Of three clients at once, up to the rounding of packings. Without what was remembered they are not."""
    model = tiny.build("llama", torch.float64)
    jobs = cohort(model, STRUCTURE, **settings)
    whole = fitted(model, STRUCTURE, jobs)
    firsts, seconds = zip(*map(halves, jobs), strict=True)
    first = fitted(model, STRUCTURE, firsts)
    kept = [replace(job, start=done.state, moments=done.moments) for job, done in zip(seconds, first, strict=True)]
    fresh = [replace(job, moments=None) for job in kept]
    for one, other, plain in zip(whole, fitted(model, STRUCTURE, kept), fitted(model, STRUCTURE, fresh), strict=True):
        torch.testing.assert_close(other.state.row, one.state.row, rtol=0, atol=1e-10)
        assert (plain.state.row - one.state.row).abs().max() > 1e-3 and plain.moments == {}


def test_two_fits_of_a_whole_model_are_one():
    base = tiny_images.MAKERS["cnn"]()
    start = base.draw(Full(), generator(0))
    job = Fit.on("c", Full(), start, [*BATCHES, *BATCHES], Optimizer(1e-3, "adam"))
    (whole,) = Engine(base).execute([job])
    first, second = halves(job)
    (done,) = Engine(base).execute([first])
    (found,) = Engine(base).execute([replace(second, start=done.state, moments=done.moments)])
    assert found.state.equal(whole.state)


def keeping():
    site = toy.clients(1, sizes=[4])["c0"]
    site.local, site.rounds = replace(site.local, keep_optimizer=True), 3
    site.begin(1, 0.1)
    return site


def fit(site, **options) -> Fit:
    """The request of one fit, which is answered with one moment for each number, all equal to the round."""
    work = site.fit(site.initial(), **options)
    asked = work.send(None)
    with pytest.raises(StopIteration):
        work.send(Fitted(asked.start, (), {"m": torch.full((24,), float(site.round)), "step": torch.tensor(2.0)}))
    return asked


def test_a_client_keeps_them_from_round_to_round_but_not_for_its_end():
    site = keeping()
    assert fit(site).moments == {}
    site.begin(3, 0.1)
    assert float(fit(site).moments["m"][0]) == 1.0
    site.begin(4, 0.1)  # after the last round
    assert fit(site).moments is None and fit(site).moments is None
    assert float(site.memory[OPTIMIZER]["moments"]["m"][0]) == 3.0
    assert fit(next(iter(toy.clients(1).values()))).moments is None


def test_what_cannot_keep_one_is_refused():
    site = keeping()
    fit(site)
    with pytest.raises(UserError, match="trains more than once in a round; set it to false"):
        fit(site)
    site.begin(2, 0.1)
    with pytest.raises(UserError, match="now trains others"):
        fit(site, train="lora_A")
    site.begin(2, 0.1)
    site.memory[OPTIMIZER] = {"train": ".*", "moments": {"m": torch.zeros(23)}}
    with pytest.raises(UserError, match="now trains others"):
        fit(site)
    with pytest.raises(UserError, match="local.keep_optimizer is True; it must be false with sgd without momentum"):
        toy.config(local={"keep_optimizer": True, "optimizer": "sgd"})
    toy.config(local={"keep_optimizer": True, "optimizer": "sgd", "momentum": 0.5})


def test_a_run_that_is_killed_goes_on_with_them(small, tmp_path):
    """The first round is that of a run without them, later ones are not. AdamW counts 2 steps a round."""
    quiet = Reporter(Console(quiet=True))
    lines = {}
    for kept in (True, False):
        config = configfile.load(small.config(tmp_path / "small.yaml", local={"keep_optimizer": kept}))
        run.train(config, tmp_path / str(kept), reporter=quiet)
        lines[kept] = [
            line for line in read_records(tmp_path / str(kept) / "metrics.jsonl") if line["kind"] == "client"
        ]
    assert lines[True][:3] == lines[False][:3] and lines[True][6:] != lines[False][6:]
    config = configfile.load(small.config(tmp_path / "small.yaml", local={"keep_optimizer": True}))
    saved = Checkpoints(tmp_path / "True/checkpoints").load(3).memory("memory/ada")[OPTIMIZER]["moments"]
    assert float(saved["step"]) == 6 and saved["exp_avg"].abs().max() > 0

    with pytest.raises(KeyboardInterrupt):
        run.train(config, tmp_path / "cut", reporter=StopsAfter(2))
    run.train(config, tmp_path / "cut", reporter=quiet)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "True/metrics.jsonl").read_bytes()
    weights = "adapters/ada/adapter_model.safetensors"
    assert (tmp_path / "cut" / weights).read_bytes() == (tmp_path / "True" / weights).read_bytes()
