"""Differential privacy of examples: what is sampled, what is counted, what is said, and what is refused."""

import io
import math

import pytest
import toy
from equal_runs import StopsAfter
from rich.console import Console
from toy_rounds import go

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.experiment import run
from llm_fed.federation.privacy import check, epsilon, spent_by
from llm_fed.federation.progress import Best, Progress
from llm_fed.method import Method
from llm_fed.method.client import NOISY_STEPS
from llm_fed.method.requests import Fit, Fitted, PerExample
from llm_fed.methods.ditto import Ditto
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.config import PrivacyConfig

SETTINGS = {"unit": "example", "clip": 1.0, "noise": 1.1}


def client(examples: int = 60, seed: int = 0, batch_size: int = 3):
    site = toy.clients(1, sizes=[examples])["c0"]
    site.local = toy.config(local={"batch_size": batch_size}).local
    site.private = PerExample(1.0, 1.1, 0, toy.secret(seed))
    site.begin(1, 0.1)
    return site


def fits(site, *awaited) -> list[Fit]:
    """The requests that the site's coroutines make."""
    seen: list[Fit] = []
    for one in awaited:
        seen.append(one.send(None))
        with pytest.raises(StopIteration):
            one.send(Fitted(seen[-1].start, ()))
    return seen


def test_each_example_is_taken_by_itself():
    """Counts by example and by step are binomial, within five standard deviations; some steps have no example."""
    steps, n, q = 4000, 60, 3 / 60
    batches = client().indices(n, steps)
    assert len(batches) == steps and [] in batches and all(batch == sorted({*batch}) for batch in batches)
    sizes = [len(batch) for batch in batches]
    assert abs(sum(sizes) / steps - n * q) < 5 * math.sqrt(n * q * (1 - q) / steps)
    assert sum((size - 3) ** 2 for size in sizes) / steps == pytest.approx(n * q * (1 - q), rel=0.15)
    for place in (0, 17, 59):
        assert abs(sum(place in batch for batch in batches) - steps * q) < 5 * math.sqrt(steps * q * (1 - q))
    both = sum(4 in batch and 5 in batch for batch in batches) / steps
    assert abs(both - q * q) < 5 * math.sqrt(q * q / steps)


def test_batches_and_noise_come_from_the_secret_the_round_and_the_fit():
    """So that a continued run repeats them, and no two fits share them."""
    one, same, other = client(), client(), client(seed=1)
    found = fits(one, one.fit(one.initial()), one.fit(one.initial()))
    (again,) = fits(same, same.fit(same.initial()))
    (strange,) = fits(other, other.fit(other.initial()))
    assert again.batches == found[0].batches and again.private == found[0].private
    longer = client()
    longer.rounds = 5
    for site in (one, longer):
        site.begin(2, 0.1)  # after the last round of one run, and a round of a longer one
    (of_longer,) = fits(longer, longer.fit(longer.initial()))
    found += [*fits(one, one.fit(one.initial())), strange]
    assert of_longer.private.secret not in {fit.private.secret for fit in found}
    assert len({str(fit.batches) for fit in found}) == len({fit.private.secret for fit in found}) == 4
    assert {(fit.private.clip, fit.private.noise, fit.private.size) for fit in found} == {(1.0, 1.1, 3)}
    assert len({fit.seed for fit in found}) == 3  # dropout does not depend on the secret


def test_the_published_epsilon_of_mnist():
    """60,000 examples, batches of 256 on the mean, noise 1.1, 60 epochs, delta 1e-5: 3.01 by the classic conversion
    from Renyi differential privacy (`test_epsilon.py` derives it), and 2.39 by privacy loss distributions (Gopi, Lee,
    Wutschitz 2021)."""
    site = client(60_000, batch_size=256)
    assert spent_by(PrivacyConfig(**SETTINGS), site) == 0
    epoch = math.ceil(60_000 / 256)
    site.memory[NOISY_STEPS] = {"rate": 256 / 60_000, "steps": 60 * epoch}
    assert 2.38 < spent_by(PrivacyConfig(**SETTINGS), site) < 2.40
    fits(site, site.fit(site.initial(), epochs=1))
    assert site.memory[NOISY_STEPS] == {"rate": 256 / 60_000, "steps": 61 * epoch}


def test_every_fit_counts_at_the_largest_rate():
    site = client(60)
    fits(site, site.fit(site.initial(), steps=5), site.fit(site.initial(), steps=2, examples=site.train[:12]))
    fits(site, site.fit(site.initial(), steps=1))
    assert site.memory[NOISY_STEPS] == {"rate": 0.25, "steps": 8}
    assert spent_by(PrivacyConfig(**SETTINGS), site) == epsilon(PrivacyConfig(clip=1.0, noise=1.1), 0.25, 8)
    small = client(2)  # fewer than a batch: all of them are in each
    (fit,) = fits(small, small.fit(small.initial(), steps=3))
    assert fit.batches == [[0, 1]] * 3 and fit.private.size == 2 and small.memory[NOISY_STEPS]["rate"] == 1
    assert spent_by(PrivacyConfig(**SETTINGS), small) == epsilon(PrivacyConfig(clip=1.0, noise=1.1), 1.0, 3)


@pytest.mark.parametrize("verb", ["losses_of", "gradient_moments", "gradient", "features"])
def test_what_looks_at_examples_without_noise_is_refused(verb):
    site = client()
    arguments = {"gradient_moments": [None, None, []], "gradient": [None, []]}.get(verb, [[]])
    with pytest.raises(UserError, match=rf"client\.{verb}; choose another method"):
        getattr(site, verb)(*arguments).send(None)


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"method": {"name": "ifca"}}, "clients of ifca also use them"),
        ({"method": {"name": "feddpa"}}, "clients of feddpa also use them"),
        ({"method": {"name": "potara"}}, "potara merges finished runs"),
        ({"adapter": None}, "adapter is null"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, word):
    config = toy.config(**{"method": {"name": "ffa"}, "privacy": SETTINGS, **settings})
    with pytest.raises(UserError, match=word):
        check(config, methods.build(config.method))
    for name in ("ffa", "fedit", "ditto", "fedmerge", "local", "fedasync"):
        config = toy.config(method={"name": name}, privacy=SETTINGS, delay={"sigma": 1.0})
        check(config, methods.build(config.method))


def test_it_needs_a_clip():
    with pytest.raises(UserError, match="privacy.clip is None; it must be a number with privacy.unit=example"):
        toy.config(privacy={"unit": "example"})


@pytest.fixture
def private_clients(monkeypatch):
    """The toy's clients of 1, 2 and 3 examples hide them."""
    plain = toy.clients

    def clients(number: int):
        made = plain(number)
        for site in made.values():
            site.private = PerExample(1.0, 1.1, 0, toy.secret())
        return made

    monkeypatch.setattr(toy, "clients", clients)


@pytest.mark.parametrize("method, fits_of_a_round", [(None, 1), (Ditto(), 2)])
@pytest.mark.parametrize("stop", [None, 2])
def test_epsilon_by_round_and_client(tmp_path, private_clients, method, fits_of_a_round, stop):
    """Two steps a fit; Ditto fits twice, for its personal model too. Clients hold 1, 2 and 3 examples, batches one. A
    run that was killed counts on. Uploads are neither clipped nor weighed by numbers of examples."""
    config = toy.config(rounds=4, privacy=SETTINGS)
    if stop:
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path, method, config=config, stop_after=stop)
    _, sites, *_ = go(tmp_path, method, config=config)
    lines = read_records(tmp_path / "metrics.jsonl")
    like = PrivacyConfig(clip=1.0, noise=1.1)
    for line in (line for line in lines if line["kind"] == "client"):
        steps = 2 * fits_of_a_round * line["round"]
        assert line["epsilon"] == pytest.approx(epsilon(like, 1 / line["examples"], steps), rel=1e-5)
    worst = [
        {k: v for k, v in line.items() if k not in ("kind", "round")} for line in lines if line["kind"] == "privacy"
    ]
    assert [line["epsilon"] for line in worst] == pytest.approx(
        [epsilon(like, 1.0, 2 * fits_of_a_round * round) for round in (1, 2, 3, 4)], rel=1e-5
    )
    assert {(line["delta"], line["unit"], len(line)) for line in worst} == {(1e-5, "example", 3)}
    assert sites["c2"].memory[NOISY_STEPS] == {"rate": 1 / 3, "steps": 8 * fits_of_a_round}


def test_uploads_are_as_they_are_and_count_alike(tmp_path, private_clients):
    seen = []

    class Listening(Method):
        async def server_update(self, server, state, uploads):
            seen.extend(uploads)
            return await super().server_update(server, state, uploads)

    go(tmp_path, Listening(), rounds=1, config=toy.config(rounds=1, privacy={**SETTINGS, "clip": 1e-3}))
    assert [upload.num_examples for upload in seen] == [1, 1, 1]
    assert all(upload.content.norm() > 0.5 for upload in seen)


def only_the_first(progress: Progress, line, config) -> bool:
    """Instead of the best round."""
    if line["round"] == 1:
        progress.best = Best(1, line["mean"])
    return line["round"] == 1


def settings_of(small, path, method: str, **changes):
    tree = {
        "rounds": 3, "eval": {"every": 1}, "privacy": {"unit": "example", "clip": 0.5, "noise": 2.0},
        "method": {"name": method}, "seed": 3, **changes,
    }  # fmt: skip
    return configfile.load(small.config(path, **tree))


def test_a_run_from_start_to_report(small, tmp_path, monkeypatch):
    """FedLoRA fine-tunes after the last round, which counts: its 3 rounds are of 2 steps, some of them its own. The
    first round is tested, but all count. Killed and continued, it ends with the same bits."""
    said = io.StringIO()
    monkeypatch.setattr(Progress, "consider", only_the_first)
    config = settings_of(small, tmp_path / "small.yaml", "fedlora")
    for name in ("run", "cut"):
        toy.plant(tmp_path / name)
    summary = run.train(config, tmp_path / "run", reporter=Reporter(Console(file=said, soft_wrap=True)))
    assert summary["round"] == 1
    spent = epsilon(PrivacyConfig(clip=0.5, noise=2.0), 2 / 6, 6)
    assert summary["privacy"] == {"epsilon": pytest.approx(spent, rel=1e-5), "delta": 1e-5, "unit": "example"}
    before = epsilon(PrivacyConfig(clip=0.5, noise=2.0), 2 / 6, 2)
    assert f"MB transferred, epsilon {before:.3g}" in said.getvalue() and before < spent
    card = (tmp_path / "run/adapters/ada/README.md").read_text()
    assert f"epsilon = {spent:.3g} at delta = 1e-05 for the training examples of ada, and at most {spent:.3g}" in card
    assert "clip 0.5, noise multiplier 2, added in every optimizer step" in card
    assert f"<dd>{spent:.2f}</dd>" in (tmp_path / "run/report.html").read_text()

    with pytest.raises(KeyboardInterrupt):
        run.train(config, tmp_path / "cut", reporter=StopsAfter(2))
    run.train(config, tmp_path / "cut", reporter=Reporter(Console(quiet=True)))
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()
    for name in ("ada", "bob"):
        weights = f"adapters/{name}/adapter_model.safetensors"
        assert (tmp_path / "cut" / weights).read_bytes() == (tmp_path / "run" / weights).read_bytes()


def test_fused_or_one_by_one(small, tmp_path):
    """Over whole runs of FFA-LoRA, which is then DP-LoRA, in float32."""
    found = []
    for per_pass in ("auto", 1):
        toy.plant(tmp_path / str(per_pass))
        config = settings_of(
            small, tmp_path / "small.yaml", "ffa", clients_per_pass=per_pass, rounds=2, eval={"every": 0}
        )
        run.train(config, tmp_path / str(per_pass), reporter=Reporter(Console(quiet=True)))
        lines = read_records(tmp_path / str(per_pass) / "metrics.jsonl")
        found.append([line["loss"] for line in lines if line["kind"] == "client"])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(found[0]) == 6
