"""What is printed reaches its reader, and no reader ends a command."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import odd_terminals
import pytest
from odd_terminals import CLIENTS, Terminal, in_terminal
from rich.table import Table

from llm_fed.basics.terminal import Lasting, lasting_streams, shown
from llm_fed.runs.tracking import Reporter


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> odd_terminals.Commands:
    found = odd_terminals.Commands(tmp_path_factory.mktemp("odd"))
    found.train()
    return found


@pytest.mark.parametrize(
    "terminal, command, listed",
    [
        (Terminal("cp1252"), "run {config} --out {new}", "clients"),  # a traceback after all the work
        (Terminal("ascii", reader="left"), "--help", "any"),  # exit code 1, as click wrote past the stream
        (Terminal("utf-8", reader="left"), "methods", "any"),
        (Terminal("utf-8", reader="full"), "eval {run} --json", "json"),
        (Terminal("utf-16"), "compare --runs {run} {local}", "any"),
        (Terminal("latin-1"), "export {run} {new}", "clients"),
        (Terminal("utf-8", reader="all closed"), "run {config} --out {new} --json", "json"),
        (Terminal("ascii"), "chat {run} --max-new-tokens 2", "any"),
    ],
)
def test_commands_on_odd_terminals(commands, terminal, command, listed):
    assert commands.wrong(terminal, command, listed) == ""


def test_a_full_disk_behind_standard_output_is_one_line(commands):
    words, new = commands.words("run {config} --out {new}")
    done = in_terminal(Terminal(reader="full"), words, commands.work)
    last = done.err.decode().splitlines()[-1]
    assert done.code == 1 and last.startswith("llm-fed: cannot write to standard output: ") and "No space left" in last
    assert json.loads((new / "summary.json").read_text())["scores"]["clients"].keys() == set(CLIENTS)


def test_what_an_encoding_lacks_is_an_escape():
    assert shown("\u0141\u00f3d\u017a", "cp1252") == "\\u0141\u00f3d\\u017a" and shown("\u0141", "utf-8") == "\u0141"


class Broken(io.StringIO):
    encoding = "utf-8"

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "x"), OSError(28, "x"), OSError(5, "x"), ValueError("closed")])
def test_a_log_that_cannot_be_written_ends_no_run(monkeypatch, error):
    """Neither of the command line nor of a program that calls llm_fed."""
    monkeypatch.setattr(sys, "stderr", Broken(error))
    Reporter().note("round 1/1: loss 0.1")
    stream = Lasting(Broken(error))
    assert stream.write("a") == 1 and stream.failure is error
    assert stream.reader_left == isinstance(error, BrokenPipeError)


def test_streams_are_as_before_afterwards():
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), lasting_streams():
        assert sys.stdout is not before[0]
        raise KeyError
    assert (sys.stdout, sys.stderr) == before


def test_a_table_is_as_wide_as_its_words_need(capsys):
    from llm_fed.basics.terminal import Terminal as Console

    table = Table("a client", "score")
    table.add_row("a-rather-long-name", "100.0")
    Console(width=12).print(table)
    assert "a-rather-long-name" in capsys.readouterr().out
    narrow = Table("several words that can be broken")
    Console(width=12).print(narrow)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 12


def test_names_stand_beside_any_number_of_columns(capsys):
    from llm_fed.basics.terminal import Terminal as Console
    from llm_fed.basics.terminal import table_of_numbers

    table = table_of_numbers("scores", "method", [f"score {n}" for n in range(12)])
    table.add_row("fedlora", *["100.00"] * 12)
    table.add_row("a-rather-long-name", *["100.00"] * 12)
    Console(width=40).print(table)
    shown = capsys.readouterr().out
    assert "fedlora" in shown and "a-rather-…" in shown


def program(*words: object, cwd: Path | None = None, **environment: str | None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in environment}
    kept |= {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-m", "llm_fed.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=kept, cwd=cwd)


@pytest.mark.slow
def test_nothing_is_needed_below_the_home(commands, tmp_path):
    """Of a container with a random user: metrics and pictures ask for caches there, and NLTK for a home."""
    done = program(
        "run", commands.config, "--out", tmp_path / "run", HOME="/proc", HF_HOME="/proc/hf", XDG_CACHE_HOME="/proc/x",
        XDG_CONFIG_HOME="/proc/x", TMPDIR="/proc",
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr and "atplotlib" not in done.stderr, done.stderr
    assert (tmp_path / "run/report.html").is_file()


def test_a_user_without_a_home_has_one_afterwards(monkeypatch, llm_fed):
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert llm_fed("--version").code == 0 and os.environ["HOME"] == "/"


def test_a_folder_that_is_gone(tmp_path, commands, llm_fed, monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: (_ for _ in ()).throw(FileNotFoundError(2, "x")))
    llm_fed("run", commands.config).assert_refused("the current folder has been deleted; change to another")


def test_no_folder_for_temporary_files(commands, llm_fed, monkeypatch, tmp_path):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.gettempdir", none)
        patch.setattr("llm_fed.experiment.run.train", lambda *_, **__: none())
        said = llm_fed("run", commands.config, "--out", tmp_path / "run")
    said.assert_refused("set TMPDIR to a folder", code=1)


def test_names_of_files_that_are_no_text(small, llm_fed, tmp_path):
    """As a file system of Latin-1 has them, or a shell without UTF-8."""
    (tmp_path / "data").mkdir()
    for name in ("a", os.fsdecode(b"Z\xfcrich")):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"question": "w1", "answer": "w2"}\n' * 9)  # none is tested
    config = small.config(tmp_path / "c.yaml", task={"path": str(tmp_path / "data")})
    said = llm_fed("run", config, "--out", tmp_path / "run")
    assert said.code == 0 and "is called 'Z%FCrich', since no folder can have its name" in said.err, said.err
    assert (tmp_path / "run/adapters/Z%FCrich").is_dir()
