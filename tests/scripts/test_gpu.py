"""scripts/gpu: `run.sh`, which goes through the steps and says what became of each, and tables from their lines."""

import json
import sys
from types import ModuleType

import pytest
from gpu_scripts import GPU, bash, calls, modules, stub

HEAD = {"step": "large", "card": "Card 1", "torch": "2.11", "commit": "abc"}
CASE = "llama-3.2-3b, 100 clients"


@pytest.fixture
def scripts(monkeypatch) -> dict[str, ModuleType]:
    return modules(monkeypatch, "steps", "lines", "table")


@pytest.mark.parametrize(
    ("code", "says", "words"),
    [
        (0, "", "large: done\n"),
        (0, "local: skipped, no base is here", "large: local: skipped, no base is here\n"),
        (75, "", "large: time is up; the same command goes on\n"),
        (124, f"begin {CASE}", f'large: stopped after 100 seconds in "{CASE}", see logs/large.log'),
        (1, "", "large: failed, see "),
    ],
)
def test_what_run_says_of_a_step(tmp_path, code, says, words):
    python = stub(tmp_path / "python", f"echo '{says}'; case $1 in */step.py) exit {code};; esac")
    done = bash(GPU / "run.sh", "--tiny", "large", OUT=tmp_path / "out", PYTHON=python)
    assert words in done.stdout and done.returncode == (0 if code == 0 else 1)
    (call,) = calls(python)
    assert call[:6] == ["large", "--tiny", "--results", f"{tmp_path}/out/results.jsonl", "--limit", "90"]


def test_run_goes_through_all_steps_in_order_of_worth(scripts, tmp_path):
    python = stub(tmp_path / "python", "")
    assert bash(GPU / "run.sh", "--tiny", OUT=tmp_path / "out", PYTHON=python).returncode == 0
    assert [call[0] for call in calls(python)] == list(scripts["steps"].STEPS)
    assert all((GPU / f"step_{step.script}.py").is_file() for step in scripts["steps"].STEPS.values())


def test_run_says_before_any_step_what_a_machine_has_too_old_or_lacks(tmp_path):
    """A transformers of another version, found before the one that is installed; then a Python without any package."""
    (tmp_path / "transformers-5.17.0.dist-info").mkdir()
    (tmp_path / "transformers-5.17.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n"
    )
    found = f'case $1 in */packages.py) PYTHONPATH={tmp_path} exec {sys.executable} "$@";; esac'
    done = bash(
        GPU / "run.sh", "--tiny", "large", OUT=tmp_path / "out", PYTHON=stub(tmp_path / "python", found)
    )  # fmt: skip
    said, *others = done.stdout.splitlines()
    assert said.startswith("transformers 5.17.0 is not what pyproject.toml asks for (transformers>=5.")
    assert others[0] == "large: done" and done.returncode == 0
    none = stub(tmp_path / "none", f'case $1 in */packages.py) exec {sys.executable} -S "$@";; esac')
    done = bash(GPU / "run.sh", "--tiny", "large", OUT=tmp_path / "other", PYTHON=none)
    assert done.returncode == 2 and not (tmp_path / "other").exists() and calls(none) == []
    assert "has no torch, transformers, peft, accelerate, which no bundle carries" in done.stderr


@pytest.mark.parametrize(("words", "part"), [(["nf5"], "no step nf5; known: equality"), (["large"], "does not start")])
def test_run_refuses_what_it_does_not_know(tmp_path, words, part):
    python = tmp_path / "nowhere" if "large" in words else "true"
    done = bash(GPU / "run.sh", *words, OUT=tmp_path / "out", PYTHON=python)
    assert done.returncode == 2 and part in done.stderr and not (tmp_path / "out").exists()


def test_a_table_shows_the_latest_line_of_each_card_and_what_was_not_run(scripts):
    Line, step = scripts["lines"].Line, scripts["steps"].STEPS["large"]
    lines = [
        Line(**HEAD, figure={"case": CASE, "seconds": 9.5}),
        Line(**HEAD, figure={"case": CASE, "seconds": 8.25, "tokens_per_second": 12345, "liger": "none"}),
        Line(**HEAD, figure={"case": CASE, "error": "out of memory"}),
        Line(**{**HEAD, "card": "Card 2"}, figure={"case": CASE, "seconds": 1, "tiny": True}),
    ]
    _, _, *rows = scripts["table"].table(step, lines).splitlines()
    assert rows[0] == f"| {CASE} | 8.25 | 12,345 |  |  |  | Card 1, 2.11, abc, liger none |"
    assert rows[1] == f"| {CASE} | 1 |  |  |  |  | Card 2, tiny shapes, 2.11, abc |"
    assert rows[2].startswith(f"| {len(step.cases) - 1} of {len(step.cases)} cases: not run |") and not rows[3:]


def test_goals_are_ratios_of_what_one_card_measured(scripts):
    """As a run has it, if that was measured, and not with all replayed; of part of the answers the whole is told."""
    Line, goals = scripts["lines"].Line, scripts["table"].goals

    def line(card: str, case: str, **figure: float):
        return Line(**{**HEAD, "card": card}, figure={"case": case, **figure})

    base = "llama-3.2-3b, 8 clients"
    before = [
        line("Card 1", f"{base}, stock PEFT, one client after another", seconds=9),
        line("Card 2", f"{base}, all replayed", seconds=1),
        line("Card 1", f"{base}, all replayed", seconds=1.5, tokens_per_second=30000),
        line("Card 1", "smollm2-135m, ours", seconds=2),
        line("Card 1", "smollm2-135m, `generate`, one client after another", seconds=0.75),
    ]
    said = [row.split(" | ")[-3:] for row in goals(before).splitlines()[2:]]
    assert said[0] == ["at least 30,000", "30,000", "reached, all replayed |"]
    assert said[5] == ["at least 9", "6", "missed, all replayed |"]
    assert said[12:14] == [["at most 2.5", "2", "reached |"], ["at least 4", "3", "missed |"]]
    assert [row[1:] for n, row in enumerate(said) if n not in (0, 5, 12, 13)] == [["", "not run |"]] * 12
    now = [*before, line("Card 1", base, seconds=0.9, tokens_per_second=50000)]
    assert [row.split(" | ")[-2:] for row in goals(now).splitlines()[7:8]] == [["10", "reached |"]]


def test_the_page_is_what_the_kept_lines_say(scripts):
    table = scripts["table"]
    page = table.PAGE.read_text()
    assert table.written(page, list(scripts["lines"].read(table.KEPT))) == page
    assert page.count("<!-- figures of ") == 3


def test_new_lines_are_kept_once_and_tiny_ones_never(scripts, tmp_path, monkeypatch):
    page, kept, results = tmp_path / "page.md", tmp_path / "kept.jsonl", tmp_path / "results.jsonl"
    page.write_text("# Page\n\n<!-- figures of large, written -->\nold\n<!-- end -->\nbehind\n")
    figures = [{"case": CASE, "seconds": 2}, {"case": CASE, "tiny": True, "seconds": 3}, {"case": CASE, "error": "no"}]
    results.write_text("".join(json.dumps({**HEAD, "figure": figure}) + "\n" for figure in figures))
    words = ["table.py", str(results), "--write", "--kept", str(kept), "--page", str(page)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", words)
        scripts["table"].main()
    assert [json.loads(line)["figure"] for line in kept.read_text().splitlines()] == figures[:1]
    text = page.read_text()
    assert f"| {CASE} | 2 |" in text and "old" not in text and text.endswith("\nbehind\n")


def test_a_damaged_line_is_named(scripts, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"step": "large"}\n')
    with pytest.raises(SystemExit, match="has not the keys of a figure"):
        list(scripts["lines"].read(path))
