"""The scores of comparisons by one setting of their rows, a curve for each comparison (Feddle, Figures 12 and 13).

FOLDER is what `llm-fed compare` wrote, KEY a key that its rows give, as in scripts/runs/feddle_atlas.yaml. Bands
reach from the lowest to the highest seed. Writes settings.csv and .png into the first FOLDER.

    python scripts/analysis/settings.py method.atlas_size FOLDER_IN_DOMAIN FOLDER_OUT_OF_DOMAIN
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from results import plain_errors, write_rows

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.plots import plot_bands


def scores(folder: Path, key: str) -> tuple[str, dict[float, list[float]]]:
    """The metric, and by value of the setting the scores (0-100) of the seeds that are there."""
    try:
        table = json.loads((folder / "table.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/table.json cannot be read ({error}); give the --out of llm-fed compare") from error
    by_value: dict[float, list[float]] = {}
    for row in table["rows"]:
        words = dict(word.split("=", 1) for word in row["words"])
        done = [result["average"] for result in row["seeds"].values() if isinstance(result, dict)]
        if key in words and done:
            by_value[float(words[key])] = done
    if not by_value:
        raise UserError(f"{folder}: no finished row gives {key}")
    return table["metric"], dict(sorted(by_value.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("key")
    parser.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args()
    rows, curves, metric = [], {}, ""
    values: set[float] = set()
    with plain_errors(parser):
        for folder in given.folders:
            metric, by_value = scores(folder, given.key)
            rows += [(folder.name, value, len(s), fmean(s), min(s), max(s)) for value, s in by_value.items()]
            values |= by_value.keys()
            # by name, so that 0 and a thousandth are as far apart as 0.1 and 1
            curves[folder.name] = (
                [f"{value:g}" for value in by_value],
                [fmean(s) for s in by_value.values()],
                [min(s) for s in by_value.values()],
                [max(s) for s in by_value.values()],
            )
    folder = write_rows(
        given.folders[0] / "settings.csv", ("comparison", given.key, "seeds", "mean", "lowest", "highest"), rows
    )
    places = [f"{value:g}" for value in sorted(values)]
    plot_bands(folder / "settings.png", curves, xlabel=given.key, ylabel=metric, places=places)


if __name__ == "__main__":
    with lasting_streams():
        main()
