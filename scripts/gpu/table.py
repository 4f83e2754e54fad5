"""Turns lines of results.jsonl into the tables of docs/performance_gpu.md, in which nothing else writes figures.

    python scripts/gpu/table.py OUT/results.jsonl            # prints the tables of this sitting
    python scripts/gpu/table.py OUT/results.jsonl --write    # keeps its lines in measured.jsonl, and writes the page
    python scripts/gpu/table.py --write                      # writes the page again from what is kept

Of each case and card the latest line counts. Tiny shapes are shown where they are printed, and never kept.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import goals
from lines import Line, append, read
from steps import STEPS, Step

KEPT = Path(__file__).with_name("measured.jsonl")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance_gpu.md"
BLOCK = re.compile(r"(<!-- figures of (\w+)[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="files of lines")
    parser.add_argument("--write", action="store_true", help="keep the lines, and write the page")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the file of lines that are kept")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the tables")
    args = parser.parse_args()
    if lacking := [str(path) for path in args.results if not path.exists()]:
        parser.error(f"there is no file {', '.join(lacking)}")
    new = [line for path in args.results for line in read(path)]
    if unknown := sorted({line.step for line in new} - set(STEPS)):
        parser.error(f"steps that no table has: {', '.join(unknown)}")
    if not args.write:
        print("\n\n".join(table(STEPS[step], [line for line in new if line.step == step]) for step in chosen(new)))
        return
    kept = list(read(args.kept))
    for line in new:
        if line.is_measured and not line.figure.get("tiny") and line not in kept:
            append(args.kept, line)
            kept.append(line)
    page = args.page.read_text(encoding="utf-8")
    args.page.write_text(written(page, kept), encoding="utf-8")


def chosen(lines: Sequence[Line]) -> list[str]:
    """The steps of which there are lines."""
    return [step for step in STEPS if any(line.step == step for line in lines)]


def written(page: str, lines: Sequence[Line]) -> str:
    """The page with its tables made from the lines."""

    def block(match: re.Match[str]) -> str:
        if match[2] == "goals":
            return f"{match[1]}\n{goals.table(lines)}\n\n{match[3]}"
        step = STEPS[match[2]]
        its = [line for line in lines if line.step == match[2]]
        return f"{match[1]}\n{textwrap.fill(step.about, 120)}\n\n{table(step, its)}\n\n{match[3]}"

    return BLOCK.sub(block, page)


def table(step: Step, lines: Sequence[Line]) -> str:
    """A row per case and card, and at the end one with all cases that were not measured."""
    cards = any(line.is_measured for line in lines)
    heads = ["case", *step.columns.values(), *(["card, torch, code"] if cards else [])]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    left: list[str] = []
    for case in step.cases:
        latest = {line.card: line for line in lines if line.case == case and line.is_measured}
        for line in latest.values():
            cells = [shown(line.figure.get(key)) for key in step.columns]
            rows.append("| " + " | ".join([case, *cells, conditions(line)]) + " |")
        if not latest:
            left.append(case)
    if left:
        rows.append("| " + " | ".join([f"not run: {'; '.join(left)}", *[""] * (len(heads) - 1)]) + " |")
    return "\n".join(rows)


def conditions(line: Line) -> str:
    """Where a line was measured, and with what."""
    tiny = ", tiny shapes" if line.figure.get("tiny") else ""
    said = [f"{line.card}{tiny}", line.torch, line.commit]
    if "transformers" in line.figure:
        said.append(f"transformers {line.figure['transformers']}")
    if liger := line.figure.get("liger"):
        said.append("no Liger" if liger == "none" else f"Liger {liger}")
    return ", ".join(said)


def shown(value: object) -> str:
    """A figure as a cell; nothing where there is none."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "/")


if __name__ == "__main__":
    main()
