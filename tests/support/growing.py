"""Data that grow, shrink and are moved about while a run goes on: no row that was trained on may ever be held out.

A case is a federation in files, in a random layout, that is divided six times. In between, rows are added, copied,
removed, shuffled, spelled otherwise and moved to another file, and files are renamed; and now and then another seed,
share or rule is asked for. What is divided is what a run divides, with what it remembers (`tasks.record`), which goes
through JSON each time.
"""

import json
import random
import shutil
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonl

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.settings.config import PartitionConfig, ServerConfig, TaskConfig
from llm_fed.tasks.common import ClientData, Example, TaskData
from llm_fed.tasks.record import Record
from llm_fed.tasks.splits import ByContent

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
    return {key(str(example.prompt), *example.answers) for example in examples}


STAGES = 6
WORDS = ["Fraktur", "wrist", "Zürich", "crate", "日本", "ward", "Surgery", "bay", "ÉTÉ", "7"]
FEW = ("has a training", "has no train file", "task.partition", "has no rows", "task.server")
Row = dict[str, str]


def key(*texts: str) -> tuple[str, ...]:
    """What a row says, apart from how it is spelled; written anew here, as a mistake must not repeat itself."""
    return tuple(" ".join(unicodedata.normalize("NFC", text).lower().split()) for text in texts)


@dataclass
class Federation:
    """Files of rows, by client and split.

    Attributes:
        layout: a file per client, a folder per client, or one file with a client column.
        tested: whether the data bring a test split.
    """

    draw: random.Random
    layout: str
    tested: bool
    files: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    made: int = 0

    def row(self) -> Row:
        """A new row; now and then one with the same answer as many others."""
        self.made += 1
        words = " ".join(self.draw.choices(WORDS, k=4))
        return {"prompt": f"{words} {self.made}", "answer": self.draw.choice([words, "yes", "no"])}

    def fill(self) -> None:
        for number in range(self.draw.randint(1, 5)):
            sizes = {"train": self.draw.choice([2, 3, 5, 9, 20])} | ({"test": 4} if self.tested else {})
            for split, size in sizes.items():
                self.files[f"client{number}", split] = [self.row() for _ in range(size)]
        for _ in range(self.draw.randint(0, 3)):  # the same row at several clients
            self.copy()

    def copy(self) -> None:
        """A row of some file into another one, or once more into the same."""
        row = dict(self.draw.choice(self.draw.choice(list(self.files.values()))))
        rows = self.draw.choice(list(self.files.values()))
        rows.insert(self.draw.randint(0, len(rows)), row)

    def on_both_sides(self) -> set[tuple[str, ...]]:
        """What the files of both splits say."""
        sides = {split: {key(*row.values()) for (_, its), rows in self.files.items() if its == split for row in rows}
                 for split in ("train", "test")}  # fmt: skip
        return sides["train"] & sides["test"]

    def change(self) -> None:
        """Something that people do to data."""
        file = self.draw.choice(list(self.files))
        rows = self.files[file]
        what = self.draw.choice(["add", "add", "copy", "remove", "shuffle", "spell", "move", "rename", "nothing"])
        if what == "add":
            for _ in range(self.draw.choice([1, 1, 3, 12])):
                rows.insert(self.draw.randint(0, len(rows)), self.row())
        elif what == "copy":
            self.copy()
        elif what == "remove" and len(rows) > 1:
            del rows[self.draw.randrange(len(rows))]
        elif what == "shuffle":
            self.draw.shuffle(rows)
        elif what == "spell":
            place = self.draw.randrange(len(rows))
            rows[place] = {column: self.spelled(text) for column, text in rows[place].items()}
        elif what == "move" and len(rows) > 1:
            self.files[self.draw.choice(list(self.files))].append(rows.pop(self.draw.randrange(len(rows))))
        elif what == "rename":
            name = f"renamed{self.made}"
            self.files = {
                (name if owner == file[0] else owner, split): own for (owner, split), own in self.files.items()
            }

    def spelled(self, text: str) -> str:
        return self.draw.choice([
            text.upper(), text.lower(), f" {text}\r\n", text.replace(" ", "  "), unicodedata.normalize("NFD", text),
        ])  # fmt: skip

    def write(self, folder: Path) -> Path:
        """The path of the data."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if self.layout == "column":
            for split in ("train", "test") if self.tested else ("train",):
                rows = [
                    {**row, "client": owner} for (owner, its), own in self.files.items() if its == split for row in own
                ]
                jsonl.write(folder / f"{split}.jsonl", rows)
            return folder if self.tested else folder / "train.jsonl"
        for (owner, split), rows in self.files.items():
            name = f"{owner}/{split}.jsonl" if self.layout == "folders" else f"{owner}-{split}.jsonl"
            jsonl.write(folder / name, rows)
        return folder


def settings(draw: random.Random, tested: bool) -> dict[str, Any]:
    """Of the task: how it is divided."""
    kind = draw.choice(["natural", "natural", "natural", "iid", "split", "test"])
    partition = {
        "natural": PartitionConfig(), "iid": PartitionConfig("iid", clients=2),
        "split": PartitionConfig("split", clients=2), "test": PartitionConfig(test=0.3),
    }[kind]  # fmt: skip
    server = draw.choice([ServerConfig()] * 4 + [ServerConfig(examples=2), ServerConfig(examples=1, each=True)])
    if kind != "test" and draw.random() < 0.1:
        server = replace(server, test=True)
    return {"validation": draw.choice([0.0, 0.1, 0.3]), "partition": partition, "server": server}


def case(seed: int, folder: Path) -> int:
    """One federation through all its stages; how often it could be divided.

    Raises:
        AssertionError: a row that was trained on is held out.
    """
    draw = random.Random(seed)
    federation = Federation(draw, draw.choice(["files", "folders", "column"]), draw.random() < 0.3)
    federation.fill()
    how, record, divided = settings(draw, federation.tested), None, 0
    trained, seen, twice = set[tuple[str, ...]](), set[tuple[str, ...]](), set[tuple[str, ...]]()
    for stage in range(STAGES):
        config = TaskConfig("files", str(federation.write(folder)), **how)
        if stage and draw.random() < 0.3:  # as `eval` with other settings, or a run that starts from this one
            config = replace(config, validation=draw.choice([0.0, 0.4]))
        try:
            data = tasks.load(config, draw.choice([seed % 5, seed % 5, 5]) if stage else seed % 5, known=record)
        except UserError as error:
            assert any(why in str(error) for why in FEW), error
        else:
            divided += 1
            trained |= rows(data, "train")
            held = rows(data, "validation") | rows(data, "test")
            twice |= federation.on_both_sides() - seen  # what the data had on both sides when it came
            seen |= trained | held
            assert not (held & trained) - twice
            assert data.record is not None
            now = data.record if record is None else data.record.after(record, stage)
            record = Record.from_json(json.loads(json.dumps(now.as_json())))
        for _ in range(draw.randint(1, 4)):
            federation.change()
    return divided


def rows(data: TaskData, split: str) -> set[tuple[str, ...]]:
    """What the rows of a split say, of all clients and the server."""
    parties = [*data.clients.values(), *([data.server] if data.server else [])]
    return {key(str(example.prompt), *example.answers) for party in parties for example in getattr(party, split)}


def moved(size: int, seed: int, share: float = tasks.TEST_SHARE) -> tuple[int, int, int]:
    """A client of `size` rows that gets one more, divided anew: how many of its old rows go from training to test, and
    from test to training; and how many were tested before."""
    rows = tuple(Example(f"question {seed} {number}", ("yes",)) for number in range(size + 1))
    before, after = (
        {*ByContent(seed).hold_out([ClientData("north", own)], "test", share)[0].test} for own in (rows[:-1], rows)
    )
    return len((after - before) - {rows[-1]}), len(before - after), len(before)
