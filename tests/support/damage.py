"""Damaged run folders: each command that reads one ends well, or says in a line what is wrong with which file.

    PYTHONPATH=tests/support python tests/support/damage.py --cases 2000 --seed 1

A run is copied and one thing in it is changed: a value somewhere in a JSON, JSONL or YAML file becomes another one or
goes, a line is gone, twice or cut, bytes are flipped, a file is empty, a folder or gone. Checksums are left out of what
is changed, as by somebody who does it on purpose; a flipped bit is named, or the outcome is what it is without it.
Whatever a command says must be printable.
"""

import contextlib
import io
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import campaign
import families
import image_runs
import pytest
import small_run
import without
import yaml

import llm_fed
from llm_fed import cli
from llm_fed.basics import checksum
from llm_fed.basics.errors import RunError, UserError
from llm_fed.eval.report import write_report
from llm_fed.experiment import run
from llm_fed.settings import configfile

SECONDS = 60  # of computing for one command
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
    "python": [],
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**70, -(2**70), 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), -float("inf"), "", "x", "1", "ada", "nan", "\x1b[31mred\x1b]0;title\x07", "\u202eabc", "../../etc",
    "a" * 5000, "\ud800", "/dev/null", [], {}, [None], [[]], [1, 2, 3], ["x"], [{}], {"x": 1}, {"": None},
    {"ada": None, "bob": "x"},
]  # fmt: skip
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
            kinds = sorted(by_kind, key=lambda kind: (kind.endswith((".json", ".jsonl", ".yaml")), kind))
            weights = [4 if kind.endswith((".json", ".jsonl", ".yaml")) else 1 for kind in kinds]
            file = rng.choice(by_kind[rng.choices(kinds, weights)[0]])
            yield name, command, str(file.relative_to(origin)), rng.randrange(2**32)

    def check(self, name: str, command: str, file: str, seed: int) -> str:
        """What is wrong with what a command does; empty if nothing is."""
        what, code, said, result = self._done(name, command, lambda run: damage(run / file, random.Random(seed)))
        lines = [line for line in said.splitlines() if line.startswith("llm-fed: ")]
        if code not in (0, 1, 2) or "Traceback" in said or (code and not lines and command not in ("audit", "compare")):
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
            code, out, err = call(COMMANDS[command]) if command != "python" else call([], _from_python)
        return what, code, out + err, (out, metrics.read_bytes() if command == "half" and not code else b"")


def flip(path: Path, position: int, bit: int) -> str:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return "flipped bits"


def damage(path: Path, rng: random.Random) -> str:
    """Change one thing of a file, or of a folder; what was done, in words."""
    if path.is_dir() and not path.is_symlink():
        kind = rng.choice(["gone", "renamed", "file"])
        if kind == "renamed":
            path.rename(path.with_name("\x1b[31mred\x07"))
            return "renamed"
        shutil.rmtree(path)
        if kind == "file":
            path.write_text("x")
        return kind
    structured = path.suffix in (".json", ".jsonl", ".yaml")
    kinds: list[Callable[[Path, random.Random], str]] = [_bytes, _lines, _whole]
    kind = rng.choice([*([_value] * 12 if structured else []), *kinds])
    return kind(path, rng)


def _value(path: Path, rng: random.Random) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        if not lines:
            return "nothing"
        number = rng.randrange(len(lines))
        if rng.random() < 0.1:
            return _everywhere(path, [json.loads(line) for line in lines], number, rng)
        value, what = _changed(json.loads(lines[number]), rng)
        lines[number] = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        path.write_bytes(("\n".join(lines) + "\n").encode(errors="surrogatepass"))
        return f"line {number + 1}: {what}"
    if path.suffix == ".yaml":
        value, what = _changed(yaml.safe_load(checksum.uncommented(text)), rng)
        path.write_text(yaml.safe_dump(value), encoding="utf-8", errors="surrogatepass")
        return what
    value, what = _changed(json.loads(text), rng)
    if isinstance(value, dict):
        value.pop(checksum.KEY, None)
    path.write_bytes(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass"))
    return what


def _everywhere(path: Path, lines: list[dict[str, Any]], number: int, rng: random.Random) -> str:
    """A key of one line goes from all lines, as an earlier version may have written none."""
    key = rng.choice([*lines[number]])
    kept = [{name: value for name, value in line.items() if name != key} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return f"all lines: {key} gone"


def _changed(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """A JSON value with one value in it, or itself, in another form."""
    if rng.random() < 0.03:
        value = rng.choice(VALUES)
        return value, f"all = {value!r:.40}"
    at, place = tree, []
    while True:
        keys = [*at] if isinstance(at, dict) else [*range(len(at))]
        if not keys:
            return tree, "nothing"
        key = rng.choice(keys)
        place.append(str(key))
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.85:
            at = at[key]
            continue
        kind = rng.choice(["value"] * 6 + ["gone", "renamed", "nested"])
        if kind == "gone":
            del at[key]
        elif kind == "renamed" and isinstance(at, dict):
            at[rng.choice(["x", "\x1b[31m", "", "ada"])] = at.pop(key)
        elif kind == "nested":
            at[key] = [at[key]] if rng.random() < 0.5 else {"x": at[key]}
        else:
            at[key] = rng.choice(VALUES)
            return tree, f"{'.'.join(place)} = {at[key]!r:.40}"
        return tree, f"{'.'.join(place)}: {kind}"


def _bytes(path: Path, rng: random.Random) -> str:
    size = path.stat().st_size
    for _ in range(rng.choice([1, 1, 5]) if size else 0):
        flip(path, rng.randrange(size), rng.randrange(8))
    return "flipped bits" if size else "nothing"


def _lines(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return "nothing"
    place, kind = rng.randrange(len(lines)), rng.choice(["gone", "twice", "cut", "moved", "empty"])
    line = lines.pop(place)
    more = {"gone": [], "twice": [line, line], "cut": [line[: len(line) // 2]], "moved": [], "empty": [b"\n", line]}
    lines[place:place] = more[kind]
    if kind == "moved":
        lines.insert(rng.randrange(len(lines) + 1), line)
    path.write_bytes(b"".join(lines))
    return f"line {place + 1} {kind}"


def _whole(path: Path, rng: random.Random) -> str:
    data, kind = (
        path.read_bytes(),
        rng.choice(["gone", "empty", "cut", "folder", "noise", "brackets", "utf-16", "null"]),
    )
    if kind in ("gone", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return kind
    contents = {
        "empty": b"", "cut": data[: rng.randrange(len(data) + 1)], "noise": rng.randbytes(100),
        "brackets": b"[" * 100_000, "utf-16": data.decode(errors="replace").encode("utf-16"), "null": b"null\n",
    }  # fmt: skip
    path.write_bytes(contents[kind])
    return kind


def _from_python(words: list[str]) -> None:
    """What a notebook does with a run."""
    try:
        opened = llm_fed.open_run("run")
        write_report(Path("run"))
        assert isinstance(opened.records, list) and isinstance(opened.scores, dict)
    except UserError as error:
        print(f"llm-fed: {error.__class__.__name__}", file=sys.stderr)
        raise SystemExit(2) from error
    except RunError as error:
        print(f"llm-fed: {error.__class__.__name__}", file=sys.stderr)
        raise SystemExit(1) from error
    raise SystemExit(0)


def call(words: list[str], command: Callable[[list[str]], None] = cli.main) -> tuple[int, str, str]:
    """The exit code of a command in this process (-1: an exception), and what it wrote on both streams."""
    out, err = io.StringIO(), io.StringIO()
    stdin, sys.stdin = sys.stdin, io.StringIO("w20\n/client\n/client bob\n")
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with campaign.limited(SECONDS):
                command(words)
        return 0, out.getvalue(), err.getvalue()
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue(), err.getvalue()
    except (Exception, campaign.Slow):
        return -1, out.getvalue(), f"{err.getvalue()[-300:]}\n{traceback.format_exc(limit=-6)}"
    finally:
        sys.stdin = stdin


def prepare(patch: Any) -> None:
    """No pictures and no measurements, which take most of the time."""
    without.disks(patch)
    without.measures(patch)
    without.pictures(patch)


def cases(given: Any) -> Iterator[campaign.Case]:
    prepare(pytest.MonkeyPatch())
    with tempfile.TemporaryDirectory() as folder:
        damaged = Damaged(Path(folder).resolve(), tuple(given.names))
        for case in itertools.islice(damaged.cases(random.Random(given.seed)), given.cases):
            yield case, partial(_verdict, damaged, case)


def _verdict(damaged: Damaged, case: tuple[str, str, str, int]) -> str:
    wrong = damaged.check(*case)
    assert not wrong, wrong
    return case[1]


if __name__ == "__main__":
    campaign.main(__doc__, cases, cases=2000, seed=0, names=NAMES)
