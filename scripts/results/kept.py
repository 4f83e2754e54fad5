"""The table and the verdict of the scores that lie beside the results pages, one line per row and draw.

    python scripts/results/kept.py docs/results/rows/flan_methods.jsonl --rows local,fedit,fedmerge
    python scripts/results/kept.py docs/results/rows/flan_methods.jsonl --add runs/flan-methods

The first command trains nothing: it says what the pages say, of the rows that are asked for (default: of all). `--add`
first appends what a comparison's folder has beyond the file, of these rows. A line has the row, the seed, the tested
round, the clients' test scores (0-100), and, where known, the bytes that a client sent. The rows `base` and `rule`
come first wherever the file has them, and take no part in the verdict on pairs. `--drawn` says what a
draw drew anew, as that of `llm-fed verdict` does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from llm_fed.basics.errors import UserError
from llm_fed.basics.files import write_file
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.scripting import plain_errors, spread
from llm_fed.eval.tables import BASELINES
from llm_fed.eval.variance import Design, Drawn
from llm_fed.eval.verdict import Verdict
from llm_fed.runs.records import read_records
from llm_fed.scoring.scores import summarize

Lines = Sequence[Mapping[str, Any]]


def added(
    lines: Lines, folder: Path, rows: Sequence[str] = (), says: Mapping[str, str] | None = None
) -> list[Mapping[str, Any]]:
    """The lines, and those that the comparison in `folder` has beyond them, of these rows or of all with base and rule.

    Args:
        says: further entries of each new line, such as its base.

    Raises:
        UserError: there is no comparison, or it has other scores for a row and seed that the file has.
    """
    try:
        table = json.loads((folder / "table.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/table.json cannot be read ({error}); give the --out of llm-fed compare") from error
    known = {(line["row"], line["seed"]): line for line in lines}
    more: list[Mapping[str, Any]] = []
    for row in [*filter(None, map(table.get, BASELINES)), *table["rows"]]:
        if rows and row["label"] not in rows:
            continue
        for seed, result in row["seeds"].items():
            if not isinstance(result, dict):  # not finished
                continue
            scores = {client: round(score, 4) for client, score in result["clients"].items()}
            line = {"row": row["label"], "seed": int(seed), "round": result["round"], "scores": scores}
            before = known.get((row["label"], int(seed)))
            if before is None:
                more.append(line | {"up": result["traffic"]["up"]} | dict(says or {}))
            elif before["scores"] != scores:
                raise UserError(
                    f"{folder} and the file have different scores of {row['label']} with seed {seed}; delete that line "
                    "from the file if the run is right"
                )
    return [*lines, *more]


def report(lines: Lines, rows: Sequence[str], drawn: Drawn = "federations") -> str:
    """A Markdown table of the rows, and the verdict on all their pairs; `drawn` see `Design`.

    Raises:
        UserError: the file has no such row.
    """
    by_row: dict[str, dict[int, Mapping[str, Any]]] = {}
    for line in lines:
        by_row.setdefault(line["row"], {})[line["seed"]] = line
    baselines = {name: by_row.pop(name) for name in BASELINES if name in by_row}
    names = list(by_row)
    if unknown := [name for name in rows if name not in names]:
        raise UserError(f"the file has no row {unknown[0]!r}; it has {', '.join(names)}")
    text = ["| row | draws | mean | worst half | MB up |", "|---|---|---|---|---|"]
    wanted = {name: by_row[name] for name in rows or names}
    seeds = {seed for own in wanted.values() for seed in own}
    baselines = {name: {seed: own[seed] for seed in own if seed in seeds} for name, own in baselines.items()}
    for name, by_seed in {**baselines, **wanted}.items():
        own = list(by_seed.values())
        summaries = [summarize("", line["scores"]) for line in own]
        means = [(summary.mean, summary.worst_half) for summary in summaries]
        up = [line["up"] / 1e6 for line in own if "up" in line]
        cells = [name, str(len(own)), *map(spread, zip(*means, strict=True)), f"{fmean(up):.2f}" if up else ""]
        text.append("| " + " | ".join(cells) + " |")
    scores = {name: {(seed, 0): line["scores"] for seed, line in own.items()} for name, own in wanted.items()}
    rules = {(seed, 0): line["scores"] for seed, line in baselines.get("rule", {}).items()}
    verdict = Verdict(scores, Design(drawn), dict.fromkeys(wanted, rules) if rules else None)
    return "\n".join(text) + "\n" + verdict.as_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", default="", help="e.g. local,fedit")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FOLDER", help="of llm-fed compare")
    parser.add_argument("--drawn", choices=get_args(Drawn), default="federations", help="what a draw drew anew")
    parser.add_argument("--says", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. base=..., for added lines")
    parser.add_argument("--from-seed", type=int, default=0, metavar="N", help="leave out the seeds below N")
    asked = parser.parse_args()
    with plain_errors(parser):
        rows = [name.strip() for name in asked.rows.split(",") if name.strip()]
        lines: Lines = read_records(asked.file)
        for folder in asked.add:
            lines = added(lines, folder, rows, dict(word.split("=", 1) for word in asked.says))
        if not lines:
            raise UserError(f"{asked.file} is absent or empty; --add fills it")
        if asked.add:
            asked.file.parent.mkdir(parents=True, exist_ok=True)
            write_file(asked.file, "".join(json.dumps(line) + "\n" for line in lines).encode())
        print(report([line for line in lines if line["seed"] >= asked.from_seed], rows, asked.drawn))


if __name__ == "__main__":
    with lasting_streams():
        main()
