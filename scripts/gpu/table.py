"""Turns lines of results.jsonl into the tables of docs/performance_gpu.md, in which nothing else writes figures.

    python scripts/gpu/table.py OUT/results.jsonl            # prints the goals, reached or not, and the tables
    python scripts/gpu/table.py OUT/results.jsonl --write    # keeps its lines in measured.jsonl, and writes the page

Of each case and card the latest line counts. Tiny shapes are shown where they are printed, and never kept.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from run import Line, append, is_measured, read
from steps import AGAIN, GOALS, STEPS, Goal, Step

KEPT = Path(__file__).with_name("measured.jsonl")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance_gpu.md"
BLOCK = re.compile(r"(<!-- figures of (\w+)[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of lines")
    parser.add_argument("--write", action="store_true", help="keep the lines, and write the page")
    args = parser.parse_args()
    if not args.results.exists():
        parser.error(f"there is no file {args.results}")
    new = [line for line in read(args.results) if is_measured(line)]
    if not args.write:
        told = [step for step in STEPS if any(line["step"] == step for line in new)]
        print("\n\n".join([goals(new), *(table(STEPS[step], new) for step in told)]))
        return
    kept = list(read(KEPT))
    for line in new:
        if not line["figure"].get("tiny") and line not in kept:
            append(KEPT, line)
            kept.append(line)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


def written(page: str, lines: Sequence[Line]) -> str:
    """The page with its tables made from the lines."""

    def block(match: re.Match[str]) -> str:
        if match[2] == "goals":
            return f"{match[1]}\n{goals(lines)}\n\n{match[3]}"
        step = STEPS[match[2]]
        return f"{match[1]}\n{textwrap.fill(step.about, 118)}\n\n{table(step, lines)}\n\n{match[3]}"

    return BLOCK.sub(block, page)


def goals(lines: Sequence[Line]) -> str:
    """A row per goal."""
    rows = ["| what | goal | measured | |", "|---|---:|---:|---|"]
    for goal in GOALS:
        value, again = measured(goal, lines)
        sign, said = "at least" if goal.least else "at most", "not run"
        if value is not None:
            said = "reached" if (value >= goal.bound if goal.least else value <= goal.bound) else "missed"
        figure = "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        rows.append(f"| {goal.what} | {sign} {goal.bound:,} | {figure} | {said}{f', {AGAIN}' if again else ''} |")
    return "\n".join(rows)


def measured(goal: Goal, lines: Sequence[Line]) -> tuple[float | None, bool]:
    """The figure, on the card where all of its cases were measured last, and whether all was replayed in one of them;
    None where there is no such card. A case as a run has it counts before the same with all replayed."""
    for card in reversed(dict.fromkeys(line["card"] for line in lines)):
        its = {line["figure"]["case"]: line["figure"].get(goal.key) for line in lines if line["card"] == card}
        found = [next((c for c in (case, f"{case}, {AGAIN}") if its.get(c) is not None), "") for case in goal.cases]
        if all(found):
            values = [float(its[case]) for case in found]
            again = any(case.endswith(AGAIN) for case in found)
            return (values[0] / (goal.times * values[1]) if len(values) > 1 else values[0]), again
    return None, False


def table(step: Step, lines: Sequence[Line]) -> str:
    """A row per case and card, and at the end one with the number of cases that were not measured."""
    heads = ["case", *step.columns.values(), "card, torch, code"]
    rows, left = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"], 0
    for case in step.cases:
        latest = {line["card"]: line for line in lines if line["figure"]["case"] == case}
        for line in latest.values():
            cells = [shown(line["figure"].get(key)) for key in step.columns]
            rows.append("| " + " | ".join([case, *cells, conditions(line)]) + " |")
        left += not latest
    if left:
        rows.append("| " + " | ".join([f"{left} of {len(step.cases)} cases: not run", *[""] * (len(heads) - 1)]) + " |")
    return "\n".join(rows)


def conditions(line: Line) -> str:
    """Where a line was measured, and with what."""
    figure = line["figure"]
    said = [line["card"] + ", tiny shapes" * bool(figure.get("tiny")), line["torch"], line["commit"]]
    return ", ".join([*said, *(f"{name} {figure[name]}" for name in ("transformers", "liger") if name in figure)])


def shown(value: object) -> str:
    """A figure as a cell; nothing where there is none."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")


if __name__ == "__main__":
    main()
