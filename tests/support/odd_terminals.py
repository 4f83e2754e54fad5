"""Commands of llm_fed where what they print meets an odd reader, and where the user has no home, or an odd one.

    PYTHONPATH=tests/support python tests/support/odd_terminals.py terminals [--cases 400] [--seed 0]
    PYTHONPATH=tests/support python tests/support/odd_terminals.py homes [--cases 40] [--seed 0]

A terminal has an encoding, a width and some of the variables that change what is printed; its reader takes everything,
leaves before the first line, has a full disk, or is not there at all. Each case is a command in a process of its own.
Whatever the terminal, the command ends as it would elsewhere: with its exit code, its files and whole JSON, every
client's name can be read, and nothing is a traceback. A full disk behind standard output is exit code 1, in one line.

Homes are what libraries look for below HOME, HF_HOME, XDG_CACHE_HOME and TMPDIR, as variables of a program that starts
anew. As root also: a user that no list knows, and a tree in which only the run folder can be written.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import io
import json
import os
import pty
import random
import select
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import small_run
import without
import yaml
from small_process import CONTEXT

CLIENTS = ("ostrava", "\u0141\u00f3d\u017a", "\u6771\u4eac", "[b]\U0001f600", "no")
ENCODINGS = ("utf-8", "cp1252", "ascii", "latin-1", "cp437", "gbk", "utf-16")
WIDTHS = (None, "0", "1", "20", "80", "500")
VARIABLES: tuple[dict[str, str], ...] = (
    {}, {}, {"TERM": "dumb"}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "xterm-256color", "FORCE_COLOR": "1"},
)  # fmt: skip
READERS = ("file", "file", "file", "closed", "all closed", "left", "full", "terminal")
# Words of commands, and what they list on standard output: clients, JSON or anything. {new} is a path without a file.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("run {config} --out {run}", "clients"),
    ("run {config} --out {run} --json", "json"),
    ("run {config} --out {new} --json", "json"),
    ("run {config} --out {new}", "clients"),
    ("run {config} --dry-run --out {new}", "any"),
    ("run {config} --dry-run --out {new} --json", "json"),
    ("eval {run}", "clients"),
    ("eval {run} --json", "json"),
    ("audit {run} --sample 0", "any"),
    ("audit {run} --sample 0 --json", "json"),
    ("export {run} {new}", "clients"),
    ("compare --runs {run} {local}", "any"),
    ("compare --runs {run} {local} --json", "json"),
    ("compare {config} --methods local,fedit --out {new}", "any"),
    ("join {run} --data {data} --out {new}", "any"),
    ("merge mean --fed {run} --local {local} --out {new}", "any"),
    ("merge mean --fed {run} --local {local} --out {new} --json", "json"),
    ("chat {run} --max-new-tokens 2", "any"),
    ("init {folder} --base {base} --yes --out {new}", "any"),
    ("methods", "any"),
    ("methods --json", "json"),
    ("tasks", "any"),
    ("runs --json", "json"),
    ("--help", "any"),
    ("eval --help", "any"),
    ("--version", "any"),
)  # fmt: skip


@dataclass(frozen=True)
class Terminal:
    encoding: str = "utf-8"
    width: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
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
        for path in self.work.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # for a user that no list knows

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
        found = list(_faults(terminal, done, listed, new if "{new}" in command and "--dry" not in command else None))
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
    if terminal.reader not in ("file", "terminal"):
        return
    text = done.out.decode(terminal.encoding)
    if listed == "json" and terminal.reader == "file":
        json.loads(text)
    if listed == "clients":
        for client in CLIENTS:
            shown = client.encode(terminal.encoding, "backslashreplace").decode(terminal.encoding)
            if shown not in text.replace("\r\n", "\n"):
                yield f"{shown} cannot be read in what was printed"


def in_terminal(terminal: Terminal, words: list[str], work: Path) -> Outcome:
    """A command in a process of its own."""
    out, err = work / "stdout", work / "stderr"
    for path in (out, err):
        path.write_bytes(b"")
    master, slave = pty.openpty() if terminal.reader == "terminal" else (None, None)
    if slave is not None:
        size = struct.pack("HHHH", 24, int(terminal.width or 80) or 80, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
    where = os.ttyname(slave) if slave is not None else str(out)
    process = CONTEXT.Process(target=_process, args=(terminal, words, where, str(err)))
    process.start()
    shown = b"" if master is None else _read(master, process.sentinel)
    process.join()
    for handle in (master, slave):
        if handle is not None:
            os.close(handle)
    assert process.exitcode is not None
    return Outcome(process.exitcode, shown or out.read_bytes(), err.read_bytes())


def _read(master: int, ended: int) -> bytes:
    """What comes from a terminal until the process has ended."""
    data = b""
    while True:
        ready, _, _ = select.select([master, ended], [], [])
        if master in ready:
            data += os.read(master, 65536)
        elif ended in ready:
            return data


def _process(terminal: Terminal, words: list[str], out: str, err: str) -> None:
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    without.disks(patch)
    without.pictures(patch, "never")
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
    os.environ.update(terminal.variables)
    if terminal.width is not None:
        os.environ["COLUMNS"] = terminal.width
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


def terminals(draw: random.Random) -> tuple[Terminal, tuple[str, str]]:
    reader = draw.choice(READERS)
    encodings = ENCODINGS[:-1] if reader == "terminal" else ENCODINGS  # the last one needs two bytes for a line's end
    return Terminal(draw.choice(encodings), draw.choice(WIDTHS), draw.choice(VARIABLES), reader), draw.choice(COMMANDS)


HOMES: tuple[dict[str, str | None], ...] = (
    {}, {"HOME": None}, {"HOME": ""}, {"HOME": "/proc"}, {"HOME": "/absent/home"}, {"HOME": "{file}"},
    {"HF_HOME": "/proc/hf"}, {"HF_HOME": "{file}"}, {"XDG_CACHE_HOME": "/proc/x", "XDG_CONFIG_HOME": "/proc/x"},
    {"TMPDIR": "/proc"}, {"TMPDIR": "/absent"}, {"HOME": "/proc", "HF_HOME": "/proc", "TMPDIR": "/proc"},
    {"MPLCONFIGDIR": "/proc/x"}, {"LC_ALL": "C"}, {"LC_ALL": "xx_YY"}, {"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"},
)  # fmt: skip
AS_ROOT = ("", "", "unknown user", "read-only", "no folder for temporary files")
TREE = """
mkdir -p {work}/tree && mount --bind / {work}/tree && mount -o remount,bind,ro {work}/tree
mount --rbind /dev {work}/tree/dev && mount --rbind /proc {work}/tree/proc
mount -t tmpfs -o ro,size=4k tmpfs {work}/tree/dev/shm && mount --bind {work}/out {work}/tree/media
exec chroot {work}/tree sh -c 'cd {work} && exec "$@"' sh "$@"
"""


def at_home(home: dict[str, str | None], place: str, words: list[str], work: Path) -> Outcome:
    """`python -m llm_fed.cli WORDS` as a program of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name, value in home.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value.format(file=work / "c.yaml")
    command = [sys.executable, "-m", "llm_fed.cli", *words]
    if place == "unknown user":
        command = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", *command]
    elif place:
        if place == "read-only":
            environment["TMPDIR"] = "/media"
        else:
            environment.pop("TMPDIR", None)
        command = ["unshare", "-m", "sh", "-c", TREE.format(work=work), "sh", *command]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, cwd=work)
    return Outcome(done.returncode, done.stdout, done.stderr)


def home_fault(draw: random.Random, commands: Commands) -> tuple[str, str]:
    """A case in words, and what is wrong with it."""
    home, root = draw.choice(HOMES), os.geteuid() == 0 and shutil.which("unshare") and shutil.which("setpriv")
    place = draw.choice(AS_ROOT) if root else ""
    out = commands.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    inside = Path("/media") if place in AS_ROOT[3:] else out
    word = draw.choice(("run {config} --out {new}", "eval {run} --json", "run {config} --dry-run --json --out {new}"))
    words, new = commands.words(word)
    words = [str(inside / "new") if each == str(new) else each for each in words]
    done = at_home(home, place, words, commands.work)
    said = done.err.decode("utf-8", "replace")
    refused = place == AS_ROOT[4]
    case = f"{home or 'usual'}{', ' + place if place else ''}: {' '.join(words[:1])}"
    if "Traceback" in said or done.code != (1 if refused else 0):
        return case, f"exit code {done.code}: {said[-400:]}"
    if refused and "TMPDIR" not in said.splitlines()[-1]:
        return case, said[-400:]
    return case, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("terminals", "homes"))
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    cases = given.cases or {"terminals": 400, "homes": 40}[given.kind]
    wrong, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        work.chmod(0o755)
        commands = Commands(work)
        commands.train()
        for number in range(cases):
            draw = random.Random(f"{given.seed}-{number}")
            if given.kind == "homes":
                case, fault = home_fault(draw, commands)
            else:
                terminal, (command, listed) = terminals(draw)
                case, fault = f"{terminal}: {command}", commands.wrong(terminal, command, listed)
            if fault:
                wrong += 1
                print(f"{number}: {case}: {fault}", flush=True)
    print(f"{given.kind}, seed {given.seed}: {cases} tried, {wrong} wrong, {time.monotonic() - started:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
