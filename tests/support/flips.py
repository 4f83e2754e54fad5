"""One flipped bit in a run folder: the next command names the damage, or does exactly what it does without it.

python tests/support/flips.py --cases 2000 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import image_runs

COMMANDS = ("run", "eval", "export")


class Runs:
    """Runs below a folder, each finished and as a kill in its last round has left it."""

    def __init__(self, folder: Path, names: tuple[str, ...] = families.FAMILIES):
        from llm_fed.experiment import run
        from llm_fed.settings import configfile

        self.folder, self.names, self._configs = folder, names, families.write(folder, names)
        self._expected: dict[tuple[str, str], Any] = {}
        for name, path in self._configs.items():
            config = configfile.load(path)
            with contextlib.suppress(KeyboardInterrupt):
                run.train(config, folder / name / "half", reporter=image_runs.Killer(config.rounds))
            run.train(config, folder / name / "whole")

    def cases(self, rng: random.Random) -> Iterator[tuple[str, str, str, int, int]]:
        """(run, command, file, position, bit) without an end: each kind of file is as likely as another."""
        while True:
            name, command = rng.choice(self.names), rng.choice(COMMANDS)
            origin = self.origin(name, command)
            files = [path for path in sorted(origin.rglob("*")) if path.is_file() and path.stat().st_size]
            by_kind: dict[str, list[Path]] = {}
            for path in files:
                by_kind.setdefault(path.suffix if path.parent.name == "rows" else path.name, []).append(path)
            file = rng.choice(by_kind[rng.choice(sorted(by_kind))])
            yield name, command, str(file.relative_to(origin)), rng.randrange(file.stat().st_size), rng.randrange(8)

    def origin(self, name: str, command: str) -> Path:
        return self.folder / name / ("half" if command == "run" else "whole")

    def check(self, name: str, command: str, file: str, position: int, bit: int) -> bool:
        """Whether the damage was named; AssertionError where it is neither named nor without effect."""
        if (name, command) not in self._expected:
            code, said, self._expected[name, command] = self._done(name, command)
            assert code == 0, said
        code, said, found = self._done(name, command, file, position, bit)
        if code:
            lines = said.strip().splitlines()
            start = next(n for n, line in enumerate(lines) if line.startswith("llm-fed: "))
            assert code in (1, 2) and len(lines) - start <= 2 and "Traceback" not in said, said
            return True
        expected = self._expected[name, command]
        if command == "export":  # it copies what it finds, and what it copies is refused where it is used
            return False
        assert found == expected, "another result"
        return False

    def _done(self, name: str, command: str, file: str = "", position: int = 0, bit: int = 0) -> tuple[int, str, Any]:
        from llm_fed import cli

        with tempfile.TemporaryDirectory() as work:
            # A place of the same name each time, since the folder's name is part of what is written.
            run, out = Path(work) / "run", Path(work) / "out"
            shutil.copytree(self.origin(name, command), run)
            if file:
                data = bytearray((run / file).read_bytes())
                data[position] ^= 1 << bit
                (run / file).write_bytes(data)
            words = {
                "run": ["run", str(self._configs[name]), "--out", str(run), "--json"],
                "eval": ["eval", str(run), "--json"],
                "export": ["export", str(run), str(out)],
            }[command]
            said, result = io.StringIO(), io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(result), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    cli.main(words)
                except SystemExit as ended:
                    code = int(ended.code or 0)
            if command == "run" and not code:
                return code, said.getvalue(), (result.getvalue(), (run / "metrics.jsonl").read_bytes())
            return code, said.getvalue(), result.getvalue().replace(work, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    faults = named = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for _, case in zip(range(given.cases), runs.cases(random.Random(given.seed)), strict=False):
            try:
                named += runs.check(*case)
            except Exception as error:
                faults += 1
                print(f"{case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{given.cases} flipped bits: {named} named, {given.cases - named - faults} without effect, {faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
