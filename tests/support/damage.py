"""Damaged run folders: each command that reads one ends well, or says in a line what is wrong with which file.

A run is copied and one thing in it is changed: a value somewhere in a JSON, JSONL or YAML file, a line, some bits, or
whether there is such a file at all. Checksums are left out of what is changed, as by somebody who does it on purpose; a
flipped bit is named, or the outcome is what it is without it. Whatever a command says must be printable.
"""

import contextlib
import io
import json
import random
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import hostile
import image_runs
import small_run
import yaml

from llm_fed import cli
from llm_fed.basics import checksum
from llm_fed.experiment import run
from llm_fed.settings import configfile

NAMES = ("fedit", "fedmerge", "potara", "images")
COMMANDS = {
    "eval": ["eval", "run"],
    "json": ["eval", "run", "--json"],
    "cross": ["eval", "run", "--cross"],
    "audit": ["audit", "run", "--sample", "1"],
    "chat": ["chat", "run"],
    "export": ["export", "run", "copies"],
    "runs": ["compare", "--runs", "run", "other", "--out", "verdict"],
    "join": ["join", "run", "--data", "../data/ada/test.jsonl", "--out", "new"],
    "merge": ["merge", "mean", "--fed", "run", "--local", "other", "--out", "both"],
    "more": ["run", "config.yaml", "--out", "run", "rounds=3"],
    "again": ["run", "config.yaml", "--out", "run"],
    "half": ["run", "config.yaml", "--out", "run", "--json", "rounds=3"],  # of a run that was killed in round 3
    "compare": ["compare", "config.yaml", "--methods", "fedit", "--out", "."],
}  # fmt: skip
_STRUCTURED = (".json", ".jsonl", ".yaml")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Damaged:
    """Finished runs, and what the commands say of them when they are damaged."""

    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES):
        self.folder, self.names = folder, names
        small = small_run.make(folder)
        self._configs = {}
        for name in names:
            if name == "images":
                (folder / "pictures").mkdir()
                path = families.write(folder / "pictures", ("images",))["images"]
            else:
                path = small.as_usual().config(folder / f"{name}.yaml", rounds=2, method={"name": name})
            self._configs[name] = path
            with contextlib.suppress(KeyboardInterrupt):
                run.train(configfile.load(path, ["rounds=3"]), self.origin(name, "half"), reporter=image_runs.Killer(3))
            run.train(configfile.load(path), self.origin(name))
        run.train(configfile.load(small.config(folder / "other.yaml", rounds=2, seed=1)), folder / "other")
        for name in {"fedit", "fedmerge"} & {*names}:
            call(["eval", str(self.origin(name)), "--cross"])
        self._expected: dict[tuple[str, str], Any] = {}

    def origin(self, name: str, command: str = "") -> Path:
        """The run that a command begins with."""
        return self.folder / "origins" / (f"{name}-half" if command == "half" else name)

    def cases(self, rng: random.Random) -> Iterator[tuple[str, str, str, int]]:
        """(run, command, file, seed) without an end: each kind of file is as likely as another."""
        while True:
            name, command = rng.choice(self.names), rng.choice(sorted(COMMANDS))
            origin = self.origin(name, command)
            by_kind: dict[str, list[Path]] = {}
            for path in sorted(origin.rglob("*")):
                if path.name.startswith(".lock") or "checkpoints" in path.parts and rng.random() < 0.7:
                    continue
                if path.is_file() or rng.random() < 0.1:
                    by_kind.setdefault(path.suffix if path.parent.name == "rows" else path.name, []).append(path)
            kinds = sorted(by_kind, key=lambda kind: (kind.endswith(_STRUCTURED), kind))
            weights = [4 if kind.endswith(_STRUCTURED) else 1 for kind in kinds]
            file = rng.choice(by_kind[rng.choices(kinds, weights)[0]])
            yield name, command, str(file.relative_to(origin)), rng.randrange(2**32)

    def check(self, name: str, command: str, file: str, seed: int) -> str:
        """What is wrong with what a command does; empty if nothing is."""
        what, code, said, result = self._done(name, command, lambda run: damage(run / file, random.Random(seed)))
        lines = [line for line in said.splitlines() if line.startswith("llm-fed: ")]
        ends = (0, 1, 2, 3) if command == "audit" else (0, 1, 2)
        if code not in ends or "Traceback" in said or (code and not lines and command not in ("audit", "compare")):
            return f"{what}: exit code {code}: {said[-2500:]}"
        if found := _UNPRINTABLE.search(said):
            return f"{what}: prints {found[0]!r}: {said[max(0, found.start() - 200) : found.end() + 80]!r}"
        if what == "flipped bits" and not code and command in ("json", "half") and result != self._usual(name, command):
            return f"{what}: another result: {result}"
        return ""

    def names_flip(self, name: str, command: str, file: str, position: int, bit: int) -> bool:
        """Whether a flipped bit is named in two lines at most; AssertionError where it changes the result instead."""
        _, code, said, result = self._done(name, command, lambda run: flip(run / file, position, bit))
        lines = said.strip().splitlines()
        start = next((n for n, line in enumerate(lines) if line.startswith("llm-fed: ")), 0)
        assert code in (0, 1, 2) and "Traceback" not in said and (not code or len(lines) - start <= 2), said
        assert code or result == self._usual(name, command), "another result"
        return bool(code)

    def _usual(self, name: str, command: str) -> Any:
        """The result without damage."""
        if (name, command) not in self._expected:
            _, code, said, self._expected[name, command] = self._done(name, command, lambda run: "")
            assert code == 0, said
        return self._expected[name, command]

    def _done(self, name: str, command: str, change: Callable[[Path], str]) -> tuple[str, int, str, Any]:
        """(what was changed, exit code, all that was said, the result), at the same place each time."""
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.origin(name, command), work / "run")
        shutil.copytree(self.folder / "other", work / "other")
        shutil.copyfile(self._configs[name], work / "config.yaml")
        what, metrics = change(work / "run"), work / "run" / "metrics.jsonl"
        with contextlib.chdir(work):
            code, out, err = call(COMMANDS[command])
        return what, code, out + err, (out, metrics.read_bytes() if command == "half" and not code else b"")


def flip(path: Path, position: int, bit: int) -> str:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return "flipped bits"


def damage(path: Path, rng: random.Random) -> str:
    """Change one thing of a file, or of a folder; what was done."""
    structured = path.suffix in _STRUCTURED
    how = rng.choice([*(["a value"] * 12 * structured), "flipped bits", "a line", "gone", "folder", "renamed", "noise"])
    if path.is_dir() or how in ("gone", "folder", "renamed"):
        if how == "renamed":
            path.rename(path.with_name("\x1b[31mred\x07"))
            return how
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if how == "folder":
            path.mkdir()
        return how
    data = path.read_bytes()
    if how == "flipped bits":
        for _ in range(rng.choice([1, 1, 5]) if data else 0):
            flip(path, rng.randrange(len(data)), rng.randrange(8))
    elif how == "noise":
        cut = data[: rng.randrange(len(data) + 1)]
        path.write_bytes(rng.choice([b"", cut, rng.randbytes(100), b"[" * 100_000, data + b"x", b"null\n"]))
    elif how == "a line":
        lines = data.splitlines(keepends=True) or [b""]
        line = lines.pop(place := rng.randrange(len(lines)))
        lines[place:place] = rng.choice([[], [line, line], [line[: len(line) // 2]], [b"\n", line], lines[:1]])
        path.write_bytes(b"".join(lines))
    else:
        with contextlib.suppress(ValueError, RecursionError):  # of a value within itself, or too deep
            path.write_bytes(_changed(path, rng).encode(errors="surrogatepass"))
    return how


def _changed(path: Path, rng: random.Random) -> str:
    """The text of a structured file, with one value changed, moved, nested or gone."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return str(yaml.safe_dump(hostile.changed(yaml.safe_load(checksum.uncommented(text)), rng)))
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        if lines and rng.random() < 0.1:  # a key goes from all lines
            key = rng.choice([*rng.choice(lines)])
            lines = [{name: value for name, value in line.items() if name != key} for line in lines]
        elif lines:
            place = rng.randrange(len(lines))
            lines[place] = hostile.changed(lines[place], rng)
        return "".join(json.dumps(line, ensure_ascii=rng.random() < 0.5) + "\n" for line in lines)
    value = hostile.changed(json.loads(text), rng)
    if isinstance(value, dict):
        value.pop(checksum.KEY, None)
    return json.dumps(value, ensure_ascii=rng.random() < 0.5)


def call(words: list[str]) -> tuple[int, str, str]:
    """The exit code of a command in this process (-1: an exception), and what it wrote on both streams."""
    out, err = io.StringIO(), io.StringIO()
    stdin, sys.stdin = sys.stdin, io.StringIO("w20\n/client\n/client bob\n")
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cli.main(words)
        return 0, out.getvalue(), err.getvalue()
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue(), err.getvalue()
    except Exception:
        return -1, out.getvalue(), f"{err.getvalue()[-300:]}\n{traceback.format_exc(limit=-6)}"
    finally:
        sys.stdin = stdin
