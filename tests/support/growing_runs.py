"""Runs over data that change: they are begun, killed, continued, extended, scored again and joined, and no row is held
out that a run has trained on.

python tests/support/growing_runs.py [--cases 200] [--seed 0]

The federations and what happens to them are those of `growing`. What sites are given is taken down as it is built.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import campaign
import growing
import tiny_base
from image_runs import Killer
from rich.console import Console

from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.commands.evaluate import evaluate_run
from llm_fed.commands.join import join
from llm_fed.experiment import run
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

METHODS = ("fedit", "fedit", "local", "fedmerge", "potara")
ACTIONS = ("continue", "continue", "extend", "eval", "eval", "join")
REFUSED = (*growing.FEW, "no client has a", "no adapter of any client", "is not finished", "has no personal adapter")
Rows = set[tuple[str, ...]]


@dataclass
class Built:
    """What the sites of one experiment were given."""

    trained: Rows = field(default_factory=set)
    held: Rows = field(default_factory=set)


@contextmanager
def built() -> Iterator[list[Built]]:
    """Each experiment that is built meanwhile."""
    real, found = build.build, []

    def taken_down(*given: Any, **named: Any) -> Any:
        clients, server, schedule = real(*given, **named)
        one = Built()
        for site in (*clients.values(), server):
            one.trained |= keys(getattr(site.data.train, "examples", site.data.train))
            for queries in site.data.queries.values():
                one.held |= keys(getattr(queries, "examples", queries))
        found.append(one)
        return clients, server, schedule

    build.build = taken_down
    try:
        yield found
    finally:
        build.build = real


def keys(examples: Any) -> Rows:
    return {growing.key(str(example.prompt), *example.answers) for example in examples}


@dataclass
class Outcome:
    """What was done in a case, what was refused, and rows that were trained on and held out."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    leaked: Rows = field(default_factory=set)


def case(seed: int, folder: Path, base: Path) -> Outcome:
    """One run through all that happens to it."""
    draw, outcome = random.Random(seed), Outcome()
    federation = growing.Federation(draw, draw.choice(["files", "folders", "column"]), draw.random() < 0.3)
    federation.fill()
    tree = {
        "rounds": 2, "base": {"name": str(base), "dtype": "float32"}, "device": "cpu",
        "adapter": {"rank": 1, "target_modules": ["q_proj"]}, "method": {"name": draw.choice(METHODS)},
        "local": {"steps": 1, "batch_size": 2}, "report": {"samples": 0},
        "eval": {"every": 1, "metric": "exact_match", "max_new_tokens": 1},
        "task": {"name": "files", "max_length": 64, "template": "plain", "validation": draw.choice([0.0, 0.2])},
        "seeds": {"evaluation": draw.choice([None, 3])},
    }  # fmt: skip
    trained, seen, twice = Rows(), Rows(), Rows()
    for stage in range(growing.STAGES):
        tree["task"]["path"] = str(federation.write(folder / "data"))
        action = draw.choice(ACTIONS) if stage else "continue"
        tree["rounds"] += action == "extend"
        with built() as experiments:
            try:
                done(action, draw, tree, folder, federation)
            except UserError as error:
                assert any(why in str(error) for why in REFUSED), error
                outcome.refused[str(error)[:60]] += 1
            else:
                outcome.done[action] += 1
        for one in experiments:
            if action in ("continue", "extend"):
                trained |= one.trained
            twice |= federation.on_both_sides() - seen
            outcome.leaked |= (one.held & trained) - twice
        if action in ("continue", "extend"):  # the others write down nothing, so a run knows no row from them
            seen |= {row for one in experiments for row in one.trained | one.held}
        for _ in range(draw.randint(1, 4)):
            federation.change()
    return outcome


def done(action: str, draw: random.Random, tree: dict[str, Any], folder: Path, federation: growing.Federation) -> None:
    """Do it; a run that goes on is killed in every third case."""
    quiet = Reporter(Console(quiet=True))
    if action in ("continue", "extend"):
        killed = draw.random() < 0.3
        with suppress(KeyboardInterrupt):
            reporter = Killer(draw.randint(1, tree["rounds"])) if killed else quiet
            reporter.console = Console(quiet=True)
            run.train(from_dict(tree), folder / "run", reporter=reporter)
    elif action == "eval":
        words = [f"task.path={tree['task']['path']}", f"task.validation={draw.choice([0.0, 0.3])}"]
        evaluate_run(folder / "run", split=draw.choice(["test", "validation"]), settings=words, reporter=quiet)
    else:
        growing.write_rows(folder / "mine.jsonl", draw.choice(list(federation.files.values())))
        number = sum(1 for _ in folder.glob("joined-*"))
        join(folder / "run", folder / "mine.jsonl", folder / f"joined-{number}", steps=1, reporter=quiet)


def cases(given: Any) -> Iterator[campaign.Case]:
    run.quiet()
    with tempfile.TemporaryDirectory() as scratch:
        base = tiny_base.folder(Path(scratch) / "base")

        def check(seed: int) -> str:
            (folder := Path(scratch) / str(seed)).mkdir()
            outcome = case(seed, folder, base)
            assert not outcome.leaked, f"{min(outcome.leaked)} was trained on and is held out"
            return f"refused {outcome.refused.total()} times"

        yield from ((seed, partial(check, seed)) for seed in range(given.seed, given.seed + given.cases))


if __name__ == "__main__":
    campaign.main(__doc__, cases, cases=200, seed=0)
