"""The epsilon of `privacy`, measured: how much an attacker learns of canaries in a run, beside what is claimed.

    OMP_NUM_THREADS=1 nice -n 10 python scripts/studies/canaries.py --out runs/analysis/canaries.jsonl

A canary is a client (or an example) with a number of its own, of which it sends (or has as its gradient) far more than
`clip`. A coin says whether it does so or sends nothing (of `where: client`: the number, or its negative). The attacker
sees every round's message (or every step's gradient), guesses of a few canaries that they are there, and the number of
right guesses bounds epsilon from below, at 95 % (Steinke, Nasr, Jagielski 2023, "Privacy Auditing with
One (1) Training Run", Theorem 5.2). The canaries of all draws together are those of one run of the product.

What makes the messages is the product's own: sampling, clipping, noise, sums, batches, steps and accountant. Nothing
is trained, as the guarantee holds for any gradients. Attackers: one that knows the settings; one that also draws
cohorts and batches from the public seed; and one that draws the noise from it, and subtracts it. The bounds hold for
all three together. `--faults` are planted into the product, and must be found: the bound is then above the claim.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from scipy.stats import binom
from torch import Tensor

import llm_fed
from llm_fed.basics.rng import Secret
from llm_fed.basics.terminal import lasting_streams
from llm_fed.engine.steps import Steps
from llm_fed.federation import privacy
from llm_fed.federation.schedule import Poisson, sample
from llm_fed.method import Upload
from llm_fed.method.client import Client
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, PerExample
from llm_fed.method.site import Data, Site
from llm_fed.settings import configfile
from llm_fed.settings.config import Config, LocalConfig, PrivacyConfig
from llm_fed.state import State

CANARIES, ROUNDS, RATE, SEED = 2000, 20, 0.02, 0  # one round where nothing is sampled
WRONG = 0.05  # how often a bound may be above the true epsilon, over all attackers
CLIP, LOUD, DELTA = 1.0, 100.0, 1e-6  # the bound loses about 2 * canaries * delta
SETTINGS = {
    "client, at the server": PrivacyConfig(clip=CLIP, noise=0.8, where="server", delta=DELTA),
    "client, at the client": PrivacyConfig(clip=CLIP, noise=4.0, where="client", delta=DELTA),
    "example": PrivacyConfig(clip=CLIP, noise=0.8, unit="example", delta=DELTA),
}
# The share of the canaries that is guessed: those of which the attacker is surest that they are there.
GUESSED = {"client, at the server": 0.01, "client, at the client": 0.01, "example": 0.005}
FAULTS = ("none", "half the noise", "twice the clip", "no Poisson sampling", "the public seed")
ATTACKERS = ("settings", "who takes part", "noise")


def public() -> Secret:
    """What version 0.4 had in the place of a secret: it follows from the seed."""
    return Secret(f"{SEED:064x}")


def at_the_server(settings: PrivacyConfig, there: Tensor, secret: Secret) -> tuple[Tensor, float]:
    """What the server's step sees, with the epsilon that is claimed."""
    config, names = _config(settings), _names()
    like, place = State.of({"x": torch.zeros(CANARIES)}), {name: n for n, name in enumerate(names)}
    schedule, seen = Poisson(names, RATE, secret), []
    for round in range(1, ROUNDS + 1):
        asked = [place[ask.client] for ask in schedule.asks(round)]
        uploads = [Upload(names[n], 1, 0, _canary(like, n)) for n in asked if there[n]]
        (noisy,) = privacy.noisy_mean(uploads, like, config, len(names), secret, round)
        seen.append(noisy.content.row * (RATE * CANARIES))
    return torch.stack(seen), privacy.epsilon(settings, RATE, ROUNDS)


def at_the_client(settings: PrivacyConfig, there: Tensor, secret: Secret) -> tuple[Tensor, float]:
    like = State.of({"x": torch.full((1,), LOUD)})
    uploads = [like if coin else -1.0 * like for coin in there]
    sent = [privacy.protected(one, settings, secret, 1, name) for one, name in zip(uploads, _names(), strict=True)]
    row = torch.cat([message.row for message in sent])  # type: ignore[union-attr]
    return (row[None] + 1) / 2, privacy.epsilon(settings, 1.0, 1)  # as if absent were 0


def at_the_examples(settings: PrivacyConfig, there: Tensor, secret: Secret) -> tuple[Tensor, float]:
    like = State.of({"x": torch.zeros(CANARIES)})
    private = PerExample(CLIP, settings.noise, 0, secret)
    local = LocalConfig(batch_size=round(RATE * CANARIES))
    site = Client("c0", None, local, SEED, lambda draws: like, Data(range(CANARIES)), private=private)  # type: ignore[arg-type]
    site.begin(1, 1.0)
    batches, noise = site.indices(CANARIES, ROUNDS), site._noise(CANARIES, ROUNDS, 0)
    fit = Fit("c0", None, like, range(CANARIES), batches, Optimizer(1.0, "sgd"), private=noise)  # type: ignore[arg-type]
    values, grads, seen = torch.zeros(1, CANARIES), torch.zeros(1, CANARIES), []
    steps = Steps({0: fit}, values, grads, like.layout)
    for batch in batches:
        grads.zero_()
        each = torch.zeros(len(batch), CANARIES)
        each[range(len(batch)), batch] = LOUD * there[batch].float()
        steps.add_clipped(each, [0] * len(batch))
        before = values.clone()
        steps.step([0])
        seen.append((before - values)[0] * local.batch_size)
    return torch.stack(seen), privacy.spent_by(settings, site)


MADE: Mapping[str, Callable[[PrivacyConfig, Tensor, Secret], tuple[Tensor, float]]] = dict(
    zip(SETTINGS, (at_the_server, at_the_client, at_the_examples), strict=True)
)


@cache
def by_the_seed(kind: str) -> tuple[Tensor, Tensor]:
    """(noise, who takes part) as the public seed gives them, each (rounds, canaries)."""
    noise, _ = MADE[kind](SETTINGS[kind], torch.zeros(CANARIES, dtype=torch.bool), public())
    took = torch.zeros(noise.shape)
    for number in range(len(noise)):
        if kind == "client, at the server":
            took[number, [int(name[1:]) for name in sample(SEED, number + 1, _names(), round(RATE * CANARIES))]] = 1
        elif kind == "example":
            took[number, _shuffled()[number]] = 1
        else:
            took[number] = 1
    return noise, took


def _shuffled() -> list[list[int]]:
    site = Site("c0", None, LocalConfig(batch_size=round(RATE * CANARIES)), SEED, None)  # type: ignore[arg-type]
    site.begin(1, 1.0)
    return site.indices(CANARIES, ROUNDS)


def log_odds(seen: Tensor, noise: float, rate: float) -> Tensor:
    """(canaries,) that it took part with this probability in each round, against that it never did."""
    ratio = (seen.double() - 0.5) / noise**2
    if rate < 1:
        ratio = torch.logaddexp(torch.full_like(ratio, 1 - rate).log(), ratio + torch.tensor(rate).log())
    return ratio.sum(0)


def scores(kind: str, seen: Tensor, settings: PrivacyConfig) -> dict[str, Tensor]:
    """By attacker how sure it is of each canary (canaries,), and that it is there."""
    rate = 1.0 if kind == "client, at the client" else RATE
    scale = settings.noise / 2 if rate == 1.0 else settings.noise
    drawn, took = by_the_seed(kind)
    known = ((seen.double() - 0.5) / scale**2 * took).sum(0)
    silent = log_odds(seen - drawn, scale / 4, rate)
    return dict(zip(ATTACKERS, (log_odds(seen, scale, rate), known, silent), strict=True))


def right(score: Tensor, there: Tensor, share: float) -> tuple[int, int]:
    """(guesses, right ones) of the share with the largest scores."""
    guesses = round(share * len(score))
    return guesses, int(there[score.argsort()[-guesses:]].sum())


def lower_bound(canaries: int, guesses: int, hits: int, delta: float, wrong: float) -> float:
    """The largest epsilon at which so many right guesses are less likely than `wrong`."""

    def likely(epsilon: float) -> float:
        each = 1 / (1 + math.exp(-epsilon))
        masses = binom.pmf(range(hits - 1, -1, -1), guesses, each).cumsum()
        most = max((mass / (n + 1) for n, mass in enumerate(masses)), default=0.0)
        return float(binom.sf(hits - 1, guesses, each) + 2 * canaries * delta * most)

    low, high = 0.0, 20.0
    if likely(low) > wrong:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if likely(middle) <= wrong else (low, middle)
    return low


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """The product with a fault."""
    gaussians, clipped, add = Secret.gaussians, privacy.clipped, Steps.add_clipped

    def add_louder(self: Steps, each: Tensor, owners: Any) -> None:
        job = self._fits[0]
        self._fits[0] = replace(job, private=replace(job.private, clip=2 * CLIP))  # type: ignore[type-var]
        add(self, each, owners)
        self._fits[0] = job

    def seeded(self: Poisson, round_: int) -> list[Any]:
        asked = sample(SEED, round_, self.clients, round(self.participation * len(self.clients)))
        return [type("Ask", (), {"client": name}) for name in asked]

    def louder(state: State, bound: float) -> State:
        return clipped(state, 2 * bound)

    patches: dict[str, list[Any]] = {
        "half the noise": [patch.object(Secret, "gaussians", lambda *given: gaussians(*given) / 2)],
        "twice the clip": [
            patch.object(privacy, "clipped", louder), patch.object(Steps, "add_clipped", add_louder),
        ],
        "no Poisson sampling": [patch.object(Client, "indices", Site.indices), patch.object(Poisson, "asks", seeded)],
    }  # fmt: skip
    with ExitStack() as stack:
        for one in patches.get(fault, ()):
            stack.enter_context(one)
        yield


def draw(kind: str, fault: str, number: int) -> dict[str, Any]:
    settings = SETTINGS[kind]
    there = torch.rand(CANARIES, generator=torch.Generator().manual_seed(number)) < 0.5
    with planted(fault):
        seen, claimed = MADE[kind](settings, there, public() if fault == "the public seed" else Secret.fresh())
    hits = {name: right(score, there, GUESSED[kind]) for name, score in scores(kind, seen, settings).items()}
    return {"kind": kind, "fault": fault, "draw": number, "claimed": claimed, "hits": hits}


def bound_of(lines: list[Mapping[str, Any]]) -> tuple[float, str]:
    """(the largest bound of all attackers, whose it is) from the canaries of these draws."""
    found = {}
    for name in ATTACKERS:
        guesses, hits = (sum(line["hits"][name][part] for line in lines) for part in (0, 1))
        delta = SETTINGS[lines[0]["kind"]].delta
        found[name] = lower_bound(CANARIES * len(lines), guesses, hits, delta, WRONG / len(ATTACKERS))
    return max((bound, name) for name, bound in found.items())


def table(lines: list[dict[str, Any]]) -> str:
    text = [
        "| noise | fault | claimed | all draws | by | largest of one draw |",
        "|---|---|---:|---:|---|---:|",
    ]
    for kind, fault in dict.fromkeys((line["kind"], line["fault"]) for line in lines):
        mine = [line for line in lines if (line["kind"], line["fault"]) == (kind, fault)]
        together, who = bound_of(list(mine))
        alone = max(bound_of([line])[0] for line in mine)
        mark = " > claimed" if together > mine[0]["claimed"] else ""
        text.append(f"| {kind} | {fault} | {mine[0]['claimed']:.2f} | {together:.2f}{mark} | {who} | {alone:.2f} |")
    return "\n".join(text)


def _canary(like: State, place: int) -> State:
    row = torch.zeros(CANARIES)
    row[place] = LOUD
    return like.like(row)


def _names() -> tuple[str, ...]:
    return tuple(f"c{n}" for n in range(CANARIES))


@cache
def _config(settings: PrivacyConfig) -> Config:
    words = [f"participation={RATE}", "base.name=none"]
    config = configfile.load(Path(llm_fed.__file__).parent / "assets/quickstart.yaml", words)
    return replace(config, privacy=settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="a line per draw; the table is printed")
    args = parser.parse_args()
    lines = []
    for kind in SETTINGS:
        for fault in args.faults:
            if fault == "no Poisson sampling" and kind == "client, at the client":
                continue  # nothing is claimed of its sampling
            lines += [draw(kind, fault, number) for number in range(args.draws)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table(lines))


if __name__ == "__main__":
    with lasting_streams():
        main()
