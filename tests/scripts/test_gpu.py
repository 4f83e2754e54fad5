"""scripts/gpu: `run.sh`, which goes through the steps and says what became of each, and tables from their lines."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
from gpu_scripts import GPU, bash, calls, modules, stub

HEAD = {"step": "nf4", "card": "Card 1", "torch": "2.11", "commit": "abc"}
CASE = "llama-3.2-3b, nf4"
LEFT = "llama-3.2-3b, bf16: cut off before, so it comes after all other steps"


@pytest.fixture
def scripts(monkeypatch) -> dict[str, ModuleType]:
    return modules(monkeypatch, "steps", "lines", "goals", "table")


@pytest.mark.parametrize(
    ("code", "says", "words"),
    [
        (0, "", "nf4: done\n"),
        (0, "local: skipped, no base is here", "nf4: local: skipped, no base is here\n"),
        (75, "", "nf4: time is up; the same command goes on\n"),
        (124, "", "nf4: stopped after 150 seconds, see logs/nf4.log"),
        (124, f"begin {CASE}", f'150 seconds in "{CASE}", which comes last next time (LIMIT=300 gives it longer), see'),
        (1, "", "nf4: failed, see "),
    ],
)
def test_what_run_says_of_a_step_and_whether_it_is_done(tmp_path, code, says, words):
    python = stub(tmp_path / "python", f"echo '{says}'; case $1 in */step.py) exit {code};; esac")
    done = bash(GPU / "run.sh", "--tiny", "nf4", OUT=tmp_path / "out", PYTHON=python)
    assert words in done.stdout and done.returncode == (0 if code == 0 else 1)
    assert (tmp_path / "out/logs/nf4.done").exists() == (words == "nf4: done\n")
    (call,) = calls(python)
    assert call[:6] == ["nf4", "--tiny", "--results", f"{tmp_path}/out/results.jsonl", "--limit", "135"]


def test_run_goes_through_all_steps_in_order_of_worth(scripts, tmp_path):
    python = stub(tmp_path / "python", "")
    assert bash(GPU / "run.sh", "--tiny", OUT=tmp_path / "out", PYTHON=python).returncode == 0
    called = [call[0] for call in calls(python)]
    assert called == list(scripts["steps"].STEPS)
    assert all((GPU / f"step_{step}.py").is_file() for step in called)


def test_what_was_cut_off_comes_after_all_other_steps(tmp_path):
    """nf4 has one such case, beside which nothing is left to do: the next call does not even start it before."""
    says = f"case \"$*\" in *'step.py nf4 '*leave*) echo '{LEFT}';; *'step.py nf4 '*only*) exit 124;; esac"
    python, words = stub(tmp_path / "python", says), ("--tiny", "nf4", "profile")
    done = bash(GPU / "run.sh", *words, OUT=tmp_path / "out", PYTHON=python)
    assert done.returncode == 1
    assert [line.split(" in ")[0] for line in done.stdout.splitlines()[:3]] == [
        "profile: done",
        "nf4: what was cut off before comes last",
        "nf4: stopped after 150 seconds, see logs/nf4.log; the same command goes on",
    ]

    def modes() -> list[tuple[str, str]]:
        return [(call[0], call[call.index("--cut-off") + 1]) for call in calls(python)]

    assert modes() == [("nf4", "leave"), ("profile", "leave"), ("nf4", "only")]
    stub(python, "")  # by now it is quick enough
    done = bash(GPU / "run.sh", *words, OUT=tmp_path / "out", PYTHON=python)
    assert modes()[3:] == [("nf4", "only")] and done.returncode == 0
    assert bash(GPU / "run.sh", *words, OUT=tmp_path / "out", PYTHON=python).stdout.count("done before") == 2


def test_run_says_before_any_step_what_a_machine_has_too_old(tmp_path):
    """A transformers of another version, found before the one that is installed."""
    (tmp_path / "transformers-5.17.0.dist-info").mkdir()
    (tmp_path / "transformers-5.17.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: transformers\n")
    with (tmp_path / "transformers-5.17.0.dist-info/METADATA").open("a") as file:
        file.write("Version: 5.17.0\n")
    python = stub(
        tmp_path / "python", f'case $1 in */present.py) PYTHONPATH={tmp_path} exec {sys.executable} "$@";; esac'
    )
    done = bash(GPU / "run.sh", "--tiny", "nf4", OUT=tmp_path / "out", PYTHON=python)
    said, *others = done.stdout.splitlines()
    assert said.startswith("transformers 5.17.0 is not what pyproject.toml asks for (transformers>=5.")
    assert others[0] == "nf4: done" and done.returncode == 0


def test_run_begins_no_step_without_what_no_bundle_carries(tmp_path):
    """A Python without any package."""
    python = stub(tmp_path / "python", f'case $1 in */present.py) exec {sys.executable} -S "$@";; esac')
    done = bash(GPU / "run.sh", "--tiny", "nf4", OUT=tmp_path / "out", PYTHON=python)
    assert done.returncode == 2 and not (tmp_path / "out").exists() and calls(python) == []
    assert "has no torch, transformers, peft, accelerate, which no bundle carries" in done.stderr


@pytest.mark.parametrize(("words", "part"), [(["nf5"], "no step nf5; known: equality"), (["nf4"], "does not start")])
def test_run_refuses_what_it_does_not_know(tmp_path, words, part):
    done = bash(GPU / "run.sh", *words, OUT=tmp_path / "out", PYTHON=tmp_path / "nowhere" if "nf4" in words else "true")
    assert done.returncode == 2 and part in done.stderr and not (tmp_path / "out").exists()


def test_a_table_shows_the_latest_line_of_each_card_and_what_was_not_run(scripts):
    Line, steps = scripts["lines"].Line, scripts["steps"]
    lines = [
        Line(**HEAD, figure={"case": CASE, "seconds": 9.5}),
        Line(**HEAD, figure={"case": CASE, "seconds": 8.25, "tokens_per_second": 12345}),
        Line(**HEAD, figure={"case": CASE, "error": "out of memory"}),
        Line(**{**HEAD, "card": "Card 2"}, figure={"case": CASE, "seconds": 1}),
    ]
    head, _, *rows = scripts["table"].table(steps.STEPS["nf4"], lines).splitlines()
    assert head == "| case | seconds | useful tokens/s | base, GiB | peak GiB | card, torch, code |"
    assert rows == [
        f"| {CASE} | 8.25 | 12,345 |  |  | Card 1, 2.11, abc |",
        f"| {CASE} | 1 |  |  |  | Card 2, 2.11, abc |",
        "| not run: llama-3.2-3b, bf16; llama-3.2-3b, int8 |  |  |  |  |  |",
    ]


def test_goals_are_ratios_of_what_one_card_measured(scripts):
    """As a run has it, if that was measured, and not with all replayed; of part of the answers the whole is told."""
    Line, goals = scripts["lines"].Line, scripts["goals"]

    def line(step: str, card: str, case: str, **figure: float):
        return Line(**{**HEAD, "step": step, "card": card}, figure={"case": case, **figure})

    base = "llama-3.2-3b, 8 clients"
    before = [
        line("training", "Card 1", f"{base}, stock PEFT, one client after another", seconds=9),
        line("training", "Card 2", f"{base}, all replayed", seconds=1),
        line("training", "Card 1", f"{base}, all replayed", seconds=1.5, tokens_per_second=30000),
        line("generation", "Card 1", "smollm2-135m, ours", seconds=2),
        line("generation", "Card 1", "smollm2-135m, `generate`, one client after another", seconds=0.75),
    ]
    said = [row.split(" | ")[-3:] for row in goals.table(before).splitlines()[2:]]
    assert said[0] == ["at least 30,000", "30,000", "reached, all replayed |"]
    assert said[5] == ["at least 9", "6", "missed, all replayed |"]
    assert said[12:14] == [["at most 2.5", "2", "reached |"], ["at least 4", "3", "missed |"]]
    assert [row[1:] for n, row in enumerate(said) if n not in (0, 5, 12, 13)] == [["", "not run |"]] * 12
    now = [*before, line("training", "Card 1", base, seconds=0.9, tokens_per_second=50000)]
    assert [row.split(" | ")[-2:] for row in goals.table(now).splitlines()[7:8]] == [["10", "reached |"]]


def test_the_page_is_what_the_kept_lines_say(scripts):
    table = scripts["table"]
    page = table.PAGE.read_text()
    assert table.written(page, list(scripts["lines"].read(table.KEPT))) == page
    assert all(f"<!-- figures of {step}, " in page for step in scripts["steps"].STEPS)


def test_new_lines_are_kept_once_and_tiny_ones_never(scripts, tmp_path, monkeypatch):
    page, kept, results = tmp_path / "page.md", tmp_path / "kept.jsonl", tmp_path / "results.jsonl"
    page.write_text("# Page\n\n<!-- figures of nf4, written -->\nold\n<!-- end -->\nbehind\n")
    figures = [{"case": CASE, "seconds": 2}, {"case": CASE, "tiny": True, "seconds": 3}, {"case": CASE, "error": "no"}]
    results.write_text("".join(json.dumps({**HEAD, "figure": figure}) + "\n" for figure in figures))
    words = ["table.py", str(results), "--write", "--kept", str(kept), "--page", str(page)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", words)
        scripts["table"].main()
    assert [json.loads(line)["figure"] for line in kept.read_text().splitlines()] == figures[:1]
    text = page.read_text()
    assert f"| {CASE} | 2 |  |  |  | Card 1, 2.11, abc |" in text and "old" not in text and text.endswith("\nbehind\n")


def test_a_table_says_with_which_libraries_a_line_was_measured(scripts):
    figures = [
        {"transformers": "5.24.0", "liger": "0.8.5"},
        {"transformers": "5.24.0", "liger": "none"},
        {"tiny": True},
    ]
    lines = [scripts["lines"].Line(**HEAD, figure={"case": CASE, **figure}) for figure in figures]
    assert [scripts["table"].conditions(line) for line in lines] == [
        "Card 1, 2.11, abc, transformers 5.24.0, Liger 0.8.5",
        "Card 1, 2.11, abc, transformers 5.24.0, no Liger",
        "Card 1, tiny shapes, 2.11, abc",
    ]


def test_a_damaged_line_is_named(scripts, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"step": "nf4"}\n')
    with pytest.raises(SystemExit, match="has not the keys of a figure"):
        list(scripts["lines"].read(path))
