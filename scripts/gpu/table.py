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
from steps import AGAIN, GOALS, ROOT, STEPS, Goal

KEPT = Path(__file__).with_name("measured.jsonl")
PAGE = ROOT / "docs" / "performance_gpu.md"
BLOCK = re.compile(r"(<!-- figures of (\w+)[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of lines")
    parser.add_argument("--write", action="store_true", help="keep the lines, and write the page")
    args = parser.parse_args()
    new = [line for line in read(args.results) if is_measured(line)]
    if not args.write:
        told = [step for step in STEPS if any(line["step"] == step for line in new)]
        print("\n\n".join([goals(new), *(table(step, new) for step in told)]))
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
        head, step, end = match.groups()
        if step == "goals":
            return f"{head}\n{goals(lines)}\n\n{end}"
        return f"{head}\n{textwrap.fill(STEPS[step].about, 118)}\n\n{table(step, lines)}\n\n{end}"

    return BLOCK.sub(block, page)


def goals(lines: Sequence[Line]) -> str:
    """A row per goal."""
    rows = ["| what | goal | measured | |", "|---|---:|---:|---|"]
    for goal in GOALS:
        value, again = measured(goal, lines)
        sign, said, figure = "at least" if goal.least else "at most", "not run", ""
        if value is not None:
            said = "reached" if (value >= goal.bound if goal.least else value <= goal.bound) else "missed"
            figure = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        rows.append(f"| {goal.what} | {sign} {goal.bound:,} | {figure} | {said}{again} |")
    return "\n".join(rows)


def measured(goal: Goal, lines: Sequence[Line]) -> tuple[float | None, str]:
    """The figure, on the card where all of its cases were measured last, and what is said of it where all was replayed;
    None where there is no such card. A case as a run has it counts before the same with all replayed."""
    for card in reversed(dict.fromkeys(line["card"] for line in lines)):
        its = {line["figure"]["case"]: line["figure"].get(goal.key) for line in lines if line["card"] == card}
        found = [case if its.get(case) is not None else f"{case}, {AGAIN}" for case in goal.cases]
        values = [float(value) for case in found if (value := its.get(case)) is not None]
        if len(values) == len(found):
            whole = values[0] / (goal.times * values[1]) if len(values) > 1 else values[0]
            return whole, f", {AGAIN}" if any(case.endswith(AGAIN) for case in found) else ""
    return None, ""


def table(step: str, lines: Sequence[Line]) -> str:
    """A row per case and card, of earlier sittings too; and one with the number of cases that were not measured."""
    columns, cases = STEPS[step].columns, STEPS[step].cases
    its, left = [line for line in lines if line["step"] == step], len(cases)
    cards = {", ".join(_card(line)) for line in its}
    heads = ["case", *columns.values(), f"code ({', '.join(cards)})" if len(cards) == 1 else "card, torch, code"]
    rows = [row(heads), "|---" * len(heads) + "|"]
    for case in dict.fromkeys([*cases, *(str(line["figure"]["case"]) for line in its)]):
        latest = {line["card"]: line for line in its if line["figure"]["case"] == case}
        for line in latest.values():
            figure = line["figure"]
            where = [*(_card(line) if len(cards) > 1 else ()), line["commit"]]
            where += [f"{name} {figure[name]}" for name in ("transformers", "liger") if name in figure]
            rows.append(row([case, *(shown(figure.get(key)) for key in columns), ", ".join(where)]))
        left -= bool(latest) and case in cases
    if left:
        rows.append(row([f"{left} of {len(cases)} cases: not run", *[""] * (len(heads) - 1)]))
    return "\n".join(rows)


def _card(line: Line) -> list[str]:
    return [line["card"] + ", tiny shapes" * bool(line["figure"].get("tiny")), line["torch"]]


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: float | str | None) -> str:
    """A figure as a cell; nothing where there is none."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
