"""The scores of the base and of the best rules for a configuration and several seeds, without training.

    python scripts/analysis/baselines.py scripts/runs/flan_methods.yaml base.name=BASE task.path=FLAN --draws 10
    python scripts/analysis/baselines.py scripts/runs/flan_methods.yaml base.name=BASE task.path=FLAN --draws 10 \\
      --to docs/results/rows/flan_methods.jsonl

It prints a row `base` (the model without training) and a row `rule` (each client's best rule that trains nothing, see
llm_fed/scoring/rules.py), and which rules these are. `--to` also writes both rows into a file that `kept.py` reads. The
base is scored once for equal test examples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results import plain_errors, spread

from llm_fed.basics.files import write_file
from llm_fed.bench.bases import Bases
from llm_fed.bench.build import Experiment, prepare
from llm_fed.experiment import run as experiment
from llm_fed.experiment.baselines import rule_line, texts_of
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile

Line = Mapping[str, Any]


def scored(config: Path, words: Sequence[str], seeds: Sequence[int], base: bool) -> dict[str, dict[int, Line]]:
    """By row (`base`, `rule`) and seed a line of scores.

    Args:
        base: whether the base is scored.

    Raises:
        UserError: the configuration cannot be prepared.
    """
    bases, reporter = Bases(), Reporter()
    known: dict[str, Line] = {}  # by test examples
    lines_by_row: dict[str, dict[int, Line]] = {"base": {}, "rule": {}}
    for seed in seeds:
        settings = configfile.load(config, [*words, f"seed={seed}"])
        built = prepare(settings, reporter, base=bases.of(settings))
        if line := rule_line(built):
            lines_by_row["rule"][seed] = line
        if base and (key := _tests(built)) not in known and (summary := built.score_base("test")):
            known[key] = summary.as_json()
        if base and key in known:
            lines_by_row["base"][seed] = known[key]
    return {row: lines for row, lines in lines_by_row.items() if lines}


def _tests(built: Experiment) -> str:
    return repr({id: list(texts_of(site.data.queries.get("test", ()))) for id, site in built.scored.items()})


def as_table(lines_by_row: Mapping[str, Mapping[int, Line]]) -> str:
    """A line of Markdown per row; then one per client, with its rule of the first seed."""
    text = ["| row | draws | mean | worst half |", "|---|---|---|---|"]
    for row, lines in lines_by_row.items():
        cells = [spread([line[key] for line in lines.values()]) for key in ("mean", "worst_half")]
        text.append(f"| {row} | {len(lines)} | {' | '.join(cells)} |")
    clients = dict.fromkeys(id for lines in lines_by_row.values() for line in lines.values() for id in line["clients"])
    text += [
        "",
        f"| client | {' | '.join(lines_by_row)} | rule of the first draw |",
        "|---" * (len(lines_by_row) + 2) + "|",
    ]
    rules = next(iter(lines_by_row.get("rule", {}).values()), {}).get("rules", {})
    for id in clients:
        scores = [
            [line["clients"][id] for line in lines.values() if id in line["clients"]] for lines in lines_by_row.values()
        ]
        text.append(f"| {id} | {' | '.join(spread(own) if own else '-' for own in scores)} | {rules.get(id, '-')} |")
    return "\n".join(text)


def with_rows(lines: Sequence[Line], lines_by_row: Mapping[str, Mapping[int, Line]]) -> list[Line]:
    """The lines of a file for `kept.py`, with these rows in the place of those that it has."""
    kept = [line for line in lines if line["row"] not in lines_by_row]
    for row, by_seed in lines_by_row.items():
        for seed, line in by_seed.items():
            scores = {client: round(score, 4) for client, score in line["clients"].items()}
            kept.append(
                {"row": row, "seed": seed, "scores": scores} | ({"rules": line["rules"]} if row == "rule" else {})
            )
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("words", nargs="*", help="key=value settings")
    parser.add_argument("--draws", type=int, default=1, help="seeds 0, 1, ...")
    parser.add_argument("--no-base", action="store_true", help="leave out the base, which has to answer all examples")
    parser.add_argument("--to", type=Path, help="a file of rows, see kept.py")
    asked = parser.parse_intermixed_args()
    with plain_errors(parser):
        experiment.quiet()
        lines_by_row = scored(asked.config, asked.words, range(asked.draws), not asked.no_base)
        if asked.to:
            lines = with_rows(read_records(asked.to), lines_by_row)
            write_file(asked.to, "".join(json.dumps(line) + "\n" for line in lines).encode())
        print(as_table(lines_by_row))


if __name__ == "__main__":
    main()
