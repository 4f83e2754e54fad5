"""What the terminal shows: help with all of its words, brackets that are text, one JSON object, what to do next."""

import io
import json
import re
import shlex

import pytest
import typer
from rich.console import Console
from typer.core import TyperArgument

from llm_fed import cli
from llm_fed.basics.errors import closest, did_you_mean, printable
from llm_fed.cli import printing
from llm_fed.commands import quickstart
from llm_fed.runs.reading import finished
from llm_fed.runs.tracking import Reporter

COMMANDS = vars(typer.main.get_command(cli.app))["commands"]
NAMES = ["[north]", "[/]", "[bold]south[/bold]", ":cat:", "[red", "\\[x]"]


def help_of(llm_fed, monkeypatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TERMINAL_WIDTH", "250")
    said = llm_fed(*words, "--help")
    assert said.code == 0
    return " ".join(re.sub("[│╭╮╰╯─]", " ", said.out).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_argument_and_option(llm_fed, monkeypatch, command):
    shown = help_of(llm_fed, monkeypatch, command)
    for parameter in COMMANDS[command].params:
        assert len(parameter.help or "") > 8, parameter.name
        assert re.sub(r"\\\[", "[", parameter.help) in shown, parameter.name
    doc = COMMANDS[command].callback.__doc__
    assert " ".join(doc.split()) in shown


def test_help_keeps_brackets(llm_fed, monkeypatch):
    assert "pip install -e '.[flower]'" in help_of(llm_fed, monkeypatch, "flower")
    assert "pip install -e '.[flower]'" in help_of(llm_fed, monkeypatch)
    assert any(isinstance(p, TyperArgument) for p in COMMANDS["run"].params)


def test_names_in_brackets_are_text(capfd):
    printing.print_scores({"[fedit]": {"metric": "rouge1", "clients": dict.fromkeys(NAMES, 1.0)} | dict.fromkeys(
        ("mean", "std", "worst_half"), 1.0)})  # fmt: skip
    printing.out.print("adapters are in runs/[a]/:cat:")
    Reporter().note("[north]: loss :cat: [/]")
    shown = capfd.readouterr()
    for name in [*NAMES, "[fedit]", "runs/[a]/:cat:"]:
        assert name in shown.out
    assert shown.err == "[north]: loss :cat: [/]\n"


def test_of_many_clients_those_without_an_example_are_named(capfd):
    scored = dict.fromkeys((f"c{number}" for number in range(printing.FEW + 1)), 1.0)
    printing.print_scores({"local": {"metric": "rouge1", "clients": scored, "unscored": ["ada", "zoe"]}})
    assert "So it is for ada, zoe." in capfd.readouterr().out  # as none of them has a row


def test_version(llm_fed):
    said = llm_fed("--version")
    assert said.code == 0 and re.fullmatch(r"llm-fed \d+\.\d+\.\d+\S*\n", said.out) and said.err == ""


def test_run_prints_one_json_object(small, llm_fed, tmp_path):
    config = small.config(tmp_path / "c.yaml", rounds=1)
    said = llm_fed("run", config, "--out", tmp_path / "a", "--json")
    assert said.code == 0 and "round 1/1" in said.err
    assert json.loads(said.out) == finished(tmp_path / "a")
    again = llm_fed("run", config, "--out", tmp_path / "a", "--json")
    assert again.out == said.out and "is complete" in again.err


def test_the_quickstart_ends_with_what_to_do_next(small, llm_fed, finished, tmp_path, monkeypatch):
    """The report is there, and the commands work as they stand."""
    out = tmp_path / "my runs"
    out.mkdir()
    (out / "fedmerge").symlink_to(finished)
    score = json.loads((finished / "summary.json").read_text())
    monkeypatch.setattr(quickstart, "run", lambda folder, seed: {"fedmerge": score})
    monkeypatch.chdir(tmp_path)
    said = llm_fed("quickstart", "--out", "my runs")
    assert "my runs/fedmerge/report.html\nmerging weights: " in said.out
    assert (out / "fedmerge/report.html").is_file()
    commands = [shlex.split(line, comments=True) for line in said.out.splitlines() if line.startswith("  ")]
    commands = [words for words in commands if words and words[0].endswith("llm-fed")]
    assert len(commands) == 3
    for program, *words in commands:
        assert program.endswith("llm-fed")
        assert llm_fed(*words).code == 0, words


def test_only_what_is_close_is_suggested():
    valid = ["local", "fedit", "fedmerge", "rounds"]
    assert [closest(name, valid) for name in ("fedmrge", "ROUNDS", "round", "FedIT")] == [
        "fedmerge", "rounds", "rounds", "fedit",
    ]  # fmt: skip
    for far in ("num_models", "xyz", "", "lr", "temperature"):
        assert closest(far, valid) is None and did_you_mean(far, valid) == ""


def test_what_others_wrote_moves_no_cursor_and_forges_no_line():
    """Names of folders and values of settings reach logs and errors; so do the labels of strangers' files."""
    assert printable("a\x1b[31m\r\x07\u202eb\x9b\ud800") == "a?[31m???b??"
    assert printable("한 ü\t👩‍🌾\nb") == "한 ü\t👩‍🌾\nb"
    said = io.StringIO()
    Reporter(Console(file=said, width=200)).note("a\nround 9/9: loss 0.0000\x1b[2J")
    assert said.getvalue() == "a round 9/9: loss 0.0000?[2J\n"


def test_an_error_has_no_terminal_sequences(llm_fed, tmp_path):
    said = llm_fed("run", tmp_path / "\x1b[2Jmine.yaml")
    said.assert_refused("?[2Jmine.yaml")
    assert "\x1b" not in said.err
