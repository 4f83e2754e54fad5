"""Damaged run folders: each command that reads one ends well, or says in a line what is wrong with which file.

    PYTHONPATH=tests/support python tests/support/damage.py --cases 2000 --seed 1

A finished run is copied and one thing in it is changed: a value somewhere in a JSON, JSONL or YAML file becomes
another one or goes, a line is gone, twice or cut, bytes are flipped, a file is empty, a folder or gone. Checksums are
left out of what is changed, as by somebody who does it on purpose. Whatever a command says must be printable.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import small_run
import yaml

from llm_fed.basics import checksum

SECONDS = 60  # of processor time for one command
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
        import families

        from llm_fed import cli
        from llm_fed.experiment import run
        from llm_fed.settings import configfile

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
            run.train(configfile.load(path), folder / "origins" / name)
        run.train(configfile.load(small.config(folder / "other.yaml", rounds=2, seed=1)), folder / "other")
        for name in {"fedit", "fedmerge"} & {*names}:
            _call(cli.main, ["eval", str(folder / "origins" / name), "--cross"])

    def cases(self, rng: random.Random) -> Iterator[tuple[str, str, str, int]]:
        """(run, command, file, seed) without an end: each kind of file is as likely as another."""
        while True:
            name, command = rng.choice(self.names), rng.choice(sorted(COMMANDS))
            origin = self.folder / "origins" / name
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
        from llm_fed import cli

        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.folder / "origins" / name, work / "run")
        shutil.copytree(self.folder / "other", work / "other")
        shutil.copyfile(self._configs[name], work / "config.yaml")
        what = damage(work / "run" / file, random.Random(seed))
        here = os.getcwd()
        os.chdir(work)
        try:
            if command == "python":
                code, said = _call(_from_python, [])
            else:
                code, said = _call(cli.main, COMMANDS[command])
        finally:
            os.chdir(here)
        lines = [line for line in said.splitlines() if line.startswith("llm-fed: ")]
        if code not in (0, 1, 2) or "Traceback" in said or (code and not lines and command not in ("audit", "compare")):
            return f"{what}: exit code {code}: {said[-2500:]}"
        if found := _UNPRINTABLE.search(said):
            return f"{what}: prints {found[0]!r}: {said[max(0, found.start() - 200) : found.end() + 80]!r}"
        return ""


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
    data = bytearray(path.read_bytes())
    if not data:
        return "nothing"
    for _ in range(rng.choice([1, 1, 5])):
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return "flipped bits"


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
    import llm_fed
    from llm_fed.basics.errors import RunError, UserError
    from llm_fed.eval.report import write_report

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


class Hangs(BaseException):
    """Nothing in the project catches this."""


def _call(command: Callable[[list[str]], None], words: list[str]) -> tuple[int, str]:
    import traceback

    def out_of_time(*given: object) -> None:
        raise Hangs

    said = io.StringIO()
    signal.signal(signal.SIGVTALRM, out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    stdin, sys.stdin = sys.stdin, io.StringIO("w20\n/client\n/client bob\n")
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                command(words)
            except SystemExit as ended:
                return int(ended.code or 0), said.getvalue()
            except (Exception, Hangs):
                return -1, f"{said.getvalue()[-300:]}\n{traceback.format_exc(limit=-6)}"
        return 0, said.getvalue()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        sys.stdin = stdin


def prepare(patch: Any) -> None:
    """No pictures and no measurements, which take most of the time."""
    import torch
    import without

    torch.set_num_threads(1)
    without.disks(patch)
    without.measures(patch)
    without.pictures(patch)


def main() -> None:
    import pytest

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    given = parser.parse_args()
    prepare(pytest.MonkeyPatch())
    tried = faults = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        damaged = Damaged(Path(folder).resolve(), tuple(given.names))
        for _, case in zip(range(given.cases), damaged.cases(random.Random(given.seed)), strict=False):
            wrong = damaged.check(*case)
            tried += 1
            if wrong:
                faults += 1
                print(f"{case}: {wrong}\n", flush=True)
    print(f"{tried} damaged folders, {faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
