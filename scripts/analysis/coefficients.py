"""How the merging coefficients that a run searched spread, by round, as numbers and a picture (Feddle, Figures 6, 8).

The report of a run has the picture, too. Writes RUN/analysis/coefficients.csv and .png.

    python scripts/analysis/coefficients.py RUN
"""

from __future__ import annotations

import argparse
from pathlib import Path

from results import plain_errors, write_rows

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval import merges
from llm_fed.runs.records import read_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    with plain_errors(parser):
        spreads = merges.spreads(line for line in read_records(run / "metrics.jsonl") if line["kind"] == "server")
        if not spreads:
            raise UserError(
                f"{run}/metrics.jsonl holds no merging coefficients; give the run of a method that searches"
            )
        columns = ("round", "anchors", "minimum", "lower_quartile", "median", "upper_quartile", "maximum", "negative")
        rows = [(spread.round, spread.anchors, *spread.quantiles, spread.negative) for spread in spreads]
        folder = write_rows(run / "analysis" / "coefficients.csv", columns, rows)
        merges.draw_spreads(spreads, folder / "coefficients.png")


if __name__ == "__main__":
    with lasting_streams():
        main()
