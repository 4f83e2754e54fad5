"""Differential privacy at the client level: clipping, noise, sampling, accounting, and what is refused."""

import io
import math
import sys
from collections import Counter
from dataclasses import replace
from statistics import NormalDist, fmean

import pytest
import torch
import toy
from rich.console import Console
from toy_rounds import TARGETS, go

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.experiment import run
from llm_fed.federation.privacy import check, check_upload, clipped, epsilon, noisy_mean, protected, statement
from llm_fed.federation.schedule import Delayed, Poisson, most_asked
from llm_fed.method import Method, Upload
from llm_fed.methods.fedit import FedIT
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.config import PrivacyConfig
from llm_fed.state import State

LARGE = 200_000


def vector(length: int = LARGE, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    draws = torch.Generator().manual_seed(seed)
    return State.of({"x": (scale * torch.randn(length, generator=draws, dtype=torch.float64)).to(dtype)})


def norm(state: State) -> float:
    return float(state.row.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_upload_is_longer_than_the_bound(dtype):
    """Rounding included; the direction stays."""
    for seed in range(20):
        for bound in (1e-3, 0.3, 1.0, 7.7):
            given = vector(500, 10.0, seed, dtype)
            found = clipped(given, bound)
            assert 0.98 * bound < norm(found) <= bound and found.row.dtype == dtype
            turned = torch.nn.functional.cosine_similarity(found.row.double(), given.row.double(), dim=0)
            assert float(turned) > 0.9999


def test_a_short_upload_is_left_alone():
    given = vector(100)
    assert clipped(given, norm(given)) is given and clipped(given, 1e9) is given
    assert not clipped(given, 0.999 * norm(given)).equal(given)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(value):
    given = vector(10)
    given.row[3] = value
    assert not clipped(given, 1.0).is_finite()


def spread(noise: torch.Tensor, deviation: float) -> None:
    """Mean, standard deviation and share within one deviation of n Gaussian numbers, four standard errors wide."""
    n = len(noise)
    assert abs(float(noise.mean())) < 4 * deviation / math.sqrt(n)
    assert abs(float(noise.std()) / deviation - 1) < 4 / math.sqrt(2 * n)
    inner = 2 * NormalDist().cdf(1) - 1
    assert abs(float((noise.abs() < deviation).double().mean()) - inner) < 4 * math.sqrt(inner * (1 - inner) / n)


def test_a_client_adds_noise_to_what_it_clipped():
    settings = PrivacyConfig(clip=0.5, noise=3.0, where="client")
    given = vector()
    sent = protected(given, settings, toy.secret(7), 2, "ada")
    spread((sent.row - clipped(given, 0.5).row).double(), 1.5)
    assert protected(given, settings, toy.secret(7), 2, "ada").equal(sent)
    for number, *other in ((8, 2, "ada"), (7 + 2**32, 2, "ada"), (7, 3, "ada"), (7, 2, "bob")):
        unlike = protected(given, settings, toy.secret(number), *other)
        assert abs(float(torch.corrcoef(torch.stack([sent.row, unlike.row]))[0, 1])) < 0.01


def test_a_client_only_clips_where_the_server_adds_the_noise():
    given = vector(100, 10.0)
    assert protected(given, PrivacyConfig(clip=0.5, noise=3.0), toy.secret(), 1, "ada").equal(clipped(given, 0.5))
    assert protected(given, PrivacyConfig(), toy.secret(), 1, "ada") is given


def test_the_server_adds_noise_to_the_sum_and_divides_by_the_expected_cohort():
    """Of 20 clients half are asked on the mean, so the sum of two is divided by 10, and the noise of 3 * 0.5 is 0.15.
    An upload of norm 5 counts as one of 0.5, however long it arrives."""
    config = toy.config(participation=0.5, privacy={"clip": 0.5, "noise": 3.0})
    short, long = vector(scale=1e-4), vector(scale=5 / math.sqrt(LARGE), seed=1)
    uploads = [Upload("a", 9, 0, short), Upload("b", 1, 0, long)]

    def sent(uploads: list[Upload], round: int = 3, number: int = 0) -> Upload:
        (found,) = noisy_mean(uploads, short, config, 20, toy.secret(number), round)
        return found

    found, mean = sent(uploads), (short.row + clipped(long, 0.5).row) / 10
    spread((found.content.row - mean).double(), 0.15)
    assert (found.num_examples, found.staleness) == (1, 0)
    nothing = sent([])
    spread(nothing.content.row.double(), 0.15)
    torch.testing.assert_close(nothing.content.row + mean, found.content.row)  # the same draw
    assert not sent([], round=4).content.equal(nothing.content)
    assert not sent([], number=1).content.equal(nothing.content)


MEAN_ONLY = [name for name in methods.METHODS if methods.build({"name": name}).mean_only]


def test_which_methods_those_are():
    assert sorted(MEAN_ONLY) == [
        "ditto", "fed+ft", "fedadagrad", "fedadam", "fedapen", "fedavgm", "fedbn", "feddpa", "fedem", "fedit",
        "fedlora", "fedmoe", "fedprox", "fedrot-lora", "fedsa", "fedsvd", "fedyogi", "ffa", "fml", "lg-fedavg",
        "pfedmoe", "rolora",
    ]  # fmt: skip
    assert not FedIT(wait="first_n").mean_only


NAMES = tuple(f"c{i}" for i in range(200))


def test_poisson_sampling_asks_each_client_by_itself():
    """Counts by client and by round are binomial: each within five standard deviations, and their variance over rounds
    is n q (1 - q), which a cohort of fixed size would not have."""
    schedule, rounds, q = Poisson(NAMES, 0.15, toy.secret(3)), range(1, 401), 0.15
    asked = [{ask.client for ask in schedule.asks(round)} for round in rounds]
    assert {ask.delay for round in rounds for ask in schedule.asks(round)} == {0}
    sizes = torch.tensor([len(cohort) for cohort in asked], dtype=torch.float64)
    assert abs(float(sizes.mean()) - 200 * q) < 5 * math.sqrt(200 * q * (1 - q) / 400)
    assert float(sizes.var()) == pytest.approx(200 * q * (1 - q), rel=0.3)
    for name in NAMES:
        assert abs(sum(name in cohort for cohort in asked) - 400 * q) < 5 * math.sqrt(400 * q * (1 - q))
    both = fmean(NAMES[0] in cohort and NAMES[1] in cohort for cohort in asked)
    assert abs(both - q * q) < 4 * math.sqrt(q * q / 400)
    assert [ask.client for ask in schedule.asks(5)] == sorted(asked[4], key=NAMES.index)
    same, other = (Poisson(NAMES, 0.15, toy.secret(number)) for number in (3, 3 + 2**32))
    assert schedule.asks(7) == same.asks(7) != other.asks(7)
    assert len(Poisson(NAMES, 1.0, toy.secret()).asks(1)) == schedule.cohort_size == 200
    assert not all(Poisson(NAMES[:3], 0.3, toy.secret()).asks(round) for round in rounds)


def test_the_client_that_is_asked_most_is_counted():
    schedule = Delayed(NAMES[:5], 0.4, 1)
    asked = [ask.client for round in range(1, 9) for ask in schedule.asks(round)]
    assert most_asked(schedule, 8) == max(asked.count(name) for name in NAMES[:5]) > most_asked(schedule, 1) == 1
    assert most_asked(schedule, 0) == 0


def private(rounds: int = 4, participation: float = 1.0, **settings):
    return toy.config(rounds=rounds, participation=participation, privacy={"clip": 1e6, **settings})


@pytest.mark.parametrize("where", ["server", "client"])
def test_without_noise_it_is_the_plain_mean(tmp_path, where):
    """From x every client goes 3/4 of the way to its target (1, 2, 4): the plain mean target is 7/3, so after two
    rounds B is 7/3 * 15/16 = 2.1875; numbers of examples (1, 2, 3) would make it 17/6 * 15/16."""
    found, *_, lines = go(tmp_path, config=private(2, where=where), rounds=2)
    assert found.state["model.layers.1.q.lora_B"].flatten().tolist() == pytest.approx([2.1875] * 6, abs=1e-12)
    assert [line["epsilon"] for line in lines if line["kind"] == "privacy"] == [None, None]


@pytest.mark.parametrize("where", ["server", "client"])
def test_uploads_are_clipped_before_they_travel(tmp_path, where, monkeypatch):
    seen = []

    class Listening(Method):
        mean_only = True

        async def server_update(self, server, state, uploads):
            seen.extend(uploads)
            return await super().server_update(server, state, uploads)

    first, *_ = go(tmp_path, Listening(), rounds=1, config=private(1, clip=0.25, where=where))
    assert [upload.num_examples for upload in seen] == ([1] if where == "server" else [1, 1, 1])
    assert max(norm(upload.content) for upload in seen) == pytest.approx(0.25, rel=0.01 if where == "client" else 0.2)
    assert all(norm(upload.content) <= 0.25 for upload in seen)


@pytest.mark.parametrize("where", ["server", "client"])
@pytest.mark.parametrize("stop", [1, 3])
def test_continued_is_uninterrupted(tmp_path, where, stop):
    config = private(5, 0.6, clip=1.0, noise=0.3, where=where)
    names = tuple(TARGETS)
    schedule = Poisson(names, 0.6, toy.secret()) if where == "server" else Delayed(names, 0.6, 2)
    settings = {"rounds": 5, "config": config, "schedule": schedule}
    for name in ("whole", "cut"):
        toy.plant(tmp_path / name)
    whole, *_ = go(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", stop_after=stop, **settings)
    again, *_ = go(tmp_path / "cut", **settings)
    assert again.state.equal(whole.state)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


class Nobody:
    """Only the second round asks somebody."""

    cohort_size = 3

    def asks(self, round):
        return toy.everyone(TARGETS).asks(round) if round == 2 else []


def test_a_round_that_asks_nobody_releases_noise_all_the_same(tmp_path):
    """Noise of 2 * 0.5 over 3 expected clients in each of 24 numbers: 1/3 each; who looks cannot tell the rounds."""
    one, *_, lines = go(tmp_path / "one", rounds=1, schedule=Nobody(), config=private(1, clip=0.5, noise=2.0))
    start = toy.clients(1)["c0"].initial()
    moved = one.state.row - start.row
    assert 0.2 < float(moved.std()) < 0.5 and all(moved)
    (line,) = (line for line in lines if line["kind"] == "round")
    assert (line["asked"], line["arrived"]) == (0, 0) and "loss" not in line
    go(tmp_path / "three", rounds=3, schedule=Nobody(), config=private(3, clip=0.5, noise=2.0))


def test_norms_are_not_compared_where_the_server_only_sees_the_sum(tmp_path):
    """Who is refused would depend on the others' uploads, and so would the sum."""
    poison = {"c0": 1.0, "c1": 1.0, "c2": 1e9}
    for where, refused in (("server", 0), ("client", 1)):
        config = replace(private(3, clip=1e12, where=where), norm_bound=1.5)
        *_, lines = go(tmp_path / where, rounds=3, config=config, runtime=toy.ToyRuntime(poison))
        assert [line["refused"] for line in lines if line["kind"] == "round"] == [refused] * 3


@pytest.mark.parametrize(
    "name, where, own", [("fedit", "server", False), ("fedsa", "server", True), ("fedmerge", "client", False)]
)
def test_a_private_run_from_start_to_report(small, tmp_path, name, where, own):
    """FedSA's B never leaves its client. Of local noise, the client that was asked most counts: not in all rounds."""
    noise = {"clip": 0.5, "noise": 4.0, "where": where}
    settings = {"rounds": 4, "participation": 0.3, "eval": {"every": 0}, "privacy": noise, "method": {"name": name}}
    said = io.StringIO()
    config = configfile.load(small.config(tmp_path / "small.yaml", **settings))
    toy.plant(tmp_path / "run", 1)  # which samples ada, and no client in all rounds
    summary = run.train(config, tmp_path / "run", reporter=Reporter(Console(file=said, soft_wrap=True)))
    lines = read_records(tmp_path / "run/metrics.jsonl")
    asked = Counter(line["client"] for line in lines if line["kind"] == "client")
    times = 4 if where == "server" else max(asked.values())
    assert times < 4 or where == "server"
    spent = epsilon(config.privacy, 0.3, times)
    logged = [line for line in lines if line["kind"] == "privacy"]
    assert len(logged) == 4 and logged[-1]["epsilon"] == pytest.approx(spent, rel=1e-5)
    assert summary["privacy"] == {"epsilon": logged[-1]["epsilon"], "delta": 1e-5, "where": where}
    assert f"MB transferred, epsilon {spent:.3g}" in said.getvalue()
    card = (tmp_path / "run/adapters/ada/README.md").read_text()
    added = "the server to the sum" if where == "server" else "each client to its uploads"
    assert f"epsilon = {spent:.3g} at delta = 1e-05, clip 0.5, noise multiplier 4, added by {added}" in card
    assert ("which is not covered either" in card) == own
    assert f"<dd>{spent:.2f}</dd>" in (tmp_path / "run/report.html").read_text()


def test_the_schedule_is_poisson_where_the_server_adds_the_noise(small, tmp_path):
    for where, kind in (("server", Poisson), ("client", Delayed)):
        path = small.config(tmp_path / "small.yaml", privacy={"clip": 1.0, "where": where})
        prepared = build.prepare(configfile.load(path), Reporter(Console(quiet=True)))
        assert type(prepared.schedule) is kind


def test_a_statement_says_where_the_noise_is_added():
    settings = PrivacyConfig(clip=2.0, noise=1.0, where="client")
    said = statement(settings, {"epsilon": 3.14159, "delta": 1e-5, "where": "client"}, toy.server(), own=False)
    assert "epsilon = 3.14 at delta = 1e-05, clip 2" in said and "each client" in said and "either" not in said
    found = {"epsilon": None, "delta": 1e-5, "where": "server"}
    assert "infinite" in statement(PrivacyConfig(clip=1.0), found, toy.server(), own=False)


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"method": {"name": "fedmerge"}}, "fedmerge is not one; set privacy.where=client"),
        ({"method": {"name": "fedit", "wait": "first_n"}}, "fedit is not one"),
        ({"method": {"name": "center"}}, "center is not one"),
        ({"delay": {"sigma": 1.0}}, "delay.sigma=0 and delay.drop_out=0"),
        ({"delay": {"drop_out": 0.1}}, "delay.sigma=0 and delay.drop_out=0"),
        ({"method": {"name": "potara"}}, "potara merges finished runs"),
        ({"method": {"name": "pooled"}}, "pooled gathers the rows of all clients"),
    ],
)
def test_what_the_server_cannot_protect_is_refused(settings, word):
    config = toy.config(**{"method": {"name": "fedit"}, "privacy": {"clip": 1.0, "noise": 1.0}, **settings})
    with pytest.raises(UserError, match=word):
        check(config, methods.build(config.method))
    if not word.startswith(("potara", "pooled")):
        check(replace(config, privacy=replace(config.privacy, where="client")), methods.build(config.method))


def test_an_upload_that_would_carry_more_than_noisy_numbers_is_refused(tmp_path):
    plain = vector(4)
    check_upload(plain)
    for message, word in (
        ({"model": 0, "delta": plain}, "hold dict"),
        (None, "hold NoneType"),
        (State(plain.layout, plain.row, {"mean": torch.zeros(1)}), "hold running statistics"),
        (State.of({"x": torch.zeros(2)}, {"count": torch.tensor(1)}), "hold running statistics"),
    ):
        with pytest.raises(UserError, match=word):
            check_upload(message)
        with pytest.raises(UserError, match=word):
            protected(message, PrivacyConfig(clip=1.0, where="client"), toy.secret(), 1, "c0")
    with pytest.raises(UserError, match="hold dict"):  # before anybody trains
        runtime = toy.ToyRuntime(TARGETS)
        go(tmp_path, methods.build({"name": "ifca"}), config=private(where="client"), runtime=runtime)
    assert not runtime.log


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"clip": 0}, "privacy.clip is 0"),
        ({"noise": 1.0}, "privacy.clip is None; it must be a number with privacy.noise"),
        ({"clip": 1.0, "noise": -1.0}, "privacy.noise is -1.0"),
        ({"clip": 1.0, "where": "cloud"}, "privacy.where='cloud' is unknown"),
        ({"clip": 1.0, "delta": 1.0}, "privacy.delta is 1.0"),
    ],
)
def test_impossible_settings_are_refused(settings, word):
    with pytest.raises(UserError, match=word):
        toy.config(privacy=settings)


def test_a_missing_accountant_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    config = toy.config(method={"name": "fedit"}, privacy={"clip": 1.0})
    with pytest.raises(UserError, match=r"dp-accounting.*pip install -e '.\[privacy\]'"):
        check(config, FedIT())
