"""Commands of llm_fed where what they print meets an odd reader.

A terminal has an encoding; its reader takes everything, leaves before the first line, has a full disk, or is not there
at all. Each case is a command in a process of its own.
"""

import gc
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_run
import without
import yaml
from small_process import CONTEXT

CLIENTS = ("ostrava", "\u0141\u00f3d\u017a", "\u6771\u4eac", "[b]\U0001f600", "no")


@dataclass(frozen=True)
class Terminal:
    encoding: str = "utf-8"
    reader: str = "file"


@dataclass(frozen=True)
class Outcome:
    code: int  # negative: a signal
    out: bytes
    err: bytes


class Commands:
    """Two finished runs of five clients whose names need every kind of letter, and what commands need beside them."""

    def __init__(self, work: Path):
        self.work, self._count = work, 0
        small = small_run.make(work / "small")
        for client in CLIENTS:
            (work / "data").mkdir(exist_ok=True)
            rows = [{"instruction": f"w{20 + n} {client}", "output": "w4 w5"} for n in range(8)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (work / "data" / f"{client}.jsonl").write_text(text, encoding="utf-8")
        tree = small.tree(rounds=1, task={"path": str(work / "data")}, local={"steps": 1}, report={"samples": 1})
        self.config = work / "c.yaml"
        self.config.write_text(yaml.safe_dump(tree))
        self._places = {
            "config": self.config, "run": work / "run", "local": work / "local", "folder": work / "data",
            "data": work / "data" / f"{CLIENTS[1]}.jsonl", "base": small.base,
        }  # fmt: skip

    def train(self) -> None:
        for name, words in (("run", []), ("local", ["method=local"])):
            done = in_terminal(Terminal(), ["run", str(self.config), *words, "--out", str(self.work / name)], self.work)
            assert done.code == 0, done.err.decode()

    def words(self, command: str) -> tuple[list[str], Path]:
        """The words, and the path for what is new."""
        self._count += 1
        new = self.work / f"new-{self._count}"
        places = {name: shlex.quote(str(path)) for name, path in {**self._places, "new": new}.items()}
        return shlex.split(command.format(**places)), new

    def wrong(self, terminal: Terminal, command: str, listed: str) -> str:
        """What is wrong with a command on a terminal; empty if nothing is."""
        words, new = self.words(command)
        done = in_terminal(terminal, words, self.work)
        found = list(_faults(terminal, done, listed, new if "{new}" in command else None))
        shutil.rmtree(new, ignore_errors=True) if new.is_dir() else new.unlink(missing_ok=True)
        shown = done.err.decode(terminal.encoding, "replace")[-400:]
        return f"{', '.join(found)}: {shown}" if found else ""


def _faults(terminal: Terminal, done: Outcome, listed: str, new: Path | None) -> Iterator[str]:
    expected = 1 if terminal.reader == "full" else 0
    if done.code != expected:
        yield f"exit code {done.code}, not {expected}"
    if b"Traceback" in done.err.replace(b"\0", b""):  # UTF-16 has zeros between letters
        yield "a traceback"
    if new is not None and not new.exists():
        yield f"{new} was not written"
    if terminal.reader != "file":
        return
    text = done.out.decode(terminal.encoding)
    if listed == "json":
        json.loads(text)
    if listed == "clients":
        for client in CLIENTS:
            shown = client.encode(terminal.encoding, "backslashreplace").decode(terminal.encoding)
            if shown not in text:
                yield f"{shown} cannot be read in what was printed"


def in_terminal(terminal: Terminal, words: list[str], work: Path) -> Outcome:
    """A command in a process of its own."""
    out, err = work / "stdout", work / "stderr"
    for path in (out, err):
        path.write_bytes(b"")
    process = CONTEXT.Process(target=_process, args=(terminal, words, str(out), str(err)))
    process.start()
    process.join()
    assert process.exitcode is not None
    return Outcome(process.exitcode, out.read_bytes(), err.read_bytes())


def _process(terminal: Terminal, words: list[str], out: str, err: str) -> None:
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    without.disks(patch)
    without.pictures(patch)
    try:
        _become(terminal, out, err)
        code = _command(words)
    except BaseException as error:  # of this file: what a command raises is its traceback
        Path(err).write_text(f"Traceback of the test itself: {error!r}")
        code = 99
    os._exit(code)


def _become(terminal: Terminal, out: str, err: str) -> None:
    """Take the place of a process that was started on this terminal."""
    for name in ("COLUMNS", "TERM", "NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    handles = [os.open(os.devnull, os.O_RDONLY), os.open(out, os.O_WRONLY), os.open(err, os.O_WRONLY | os.O_APPEND)]
    if terminal.reader == "left":
        reader, handles[1] = os.pipe()
        os.close(reader)
    elif terminal.reader == "full":
        handles[1] = os.open("/dev/full", os.O_WRONLY)
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
    closed = {"closed": (1,), "all closed": (0, 1, 2)}.get(terminal.reader, ())
    for number in closed:
        os.close(number)
    sys.stdin = None if 0 in closed else io.StringIO("w20\n/client no\nw21\n")  # type: ignore[assignment]
    sys.stdout, sys.stderr = (
        None if number in closed else _stream(number, terminal.encoding, errors)  # type: ignore[assignment]
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    from llm_fed.cli import printing

    printing.out.__init__()  # type: ignore[misc]  # which looks at the variables when it is made


def _stream(number: int, encoding: str, errors: str) -> io.TextIOWrapper:
    """As Python opens the streams of a process."""
    return io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), encoding=encoding, errors=errors, newline=None)


def _command(words: list[str]) -> int:
    """The exit code of a command, and of Python, which writes what is left when it ends."""
    import traceback

    from llm_fed import cli

    code = 0
    try:
        cli.main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = code or 120
    return code
