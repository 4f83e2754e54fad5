"""The results of a run as data frames of pandas, with a row per number and names that say what it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fed.runs.records import read_records

if TYPE_CHECKING:
    import pandas as pd

_SCORES = ("model", "split", "round", "client", "metric", "score", "loss")
_ROUNDS = ("round", "loss", "lr", "bytes_up", "bytes_down", "asked", "arrived", "refused", "failed", "dropped_out")
_CLIENTS = ("round", "client", "loss", "examples", "steps", "bytes_up", "bytes_down", "staleness")
_WEIGHTS = ("round", "client", "model", "weight")
_SAMPLES = ("client", "prompt", "references", "base", "answer")


class Frames:
    """Data frames of a run, finished or not, read when they are requested. `folder`: of the run."""

    def __init__(self, folder: Path):
        self._folder = folder

    @property
    def scores(self) -> pd.DataFrame:
        """A row for each client, round and split that was scored: model (personal, base, rule), split, round, client,
        metric, score (0-100), loss (per token or picture). Those of base and rule have the round 0."""
        rows = []
        for line in self._lines("score", "rule"):
            model = "rule" if line["kind"] == "rule" else "personal" if line["round"] else "base"
            common = {"model": model, "split": line["split"], "round": line["round"] if model != "rule" else 0}
            losses = line.get("losses", {})
            for client, score in line.get("clients", {}).items():
                own = {"client": client, "metric": line["metric"], "score": score, "loss": losses.get(client)}
                rows.append(common | own)
        return _frame(rows, _SCORES)

    @property
    def rounds(self) -> pd.DataFrame:
        """A row for each round: mean training loss, learning rate, bytes to and from all clients, and how many clients
        were asked, answered, failed, ..."""
        return _frame(self._lines("round"), _ROUNDS)

    @property
    def clients(self) -> pd.DataFrame:
        """A row for each answer of a client: its training loss, examples, steps, and bytes."""
        return _frame(self._lines("client"), _CLIENTS)

    @property
    def weights(self) -> pd.DataFrame:
        """A row for each model that a method merges into a client's: round, client, model (its number), weight. Of a
        method that chooses one of several, that one with the weight 1. Empty of all other methods."""
        rows = []
        for line in self._lines("server"):
            own = line.get("weights", {"clients": [], "values": []})
            merged = zip(own["clients"], own["values"], strict=True)
            weighed = [(client, *each) for client, values in merged for each in enumerate(values)]
            weighed += [(client, model, 1.0) for client, model in line.get("chosen", {}).items()]
            rows += [dict(zip(_WEIGHTS, (line["round"], *each), strict=True)) for each in weighed]
        return _frame(rows, _WEIGHTS)

    @property
    def samples(self) -> pd.DataFrame:
        """A row for each sample prediction: client, prompt, references, the base's answer and the client's."""
        return _frame(read_records(self._folder / "samples.jsonl"), _SAMPLES)

    def _lines(self, *kinds: str) -> Iterable[dict[str, Any]]:
        return [line for line in read_records(self._folder / "metrics.jsonl") if line["kind"] in kinds]


def _frame(rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    import pandas as pd  # takes a second to import

    return pd.DataFrame([{key: row.get(key) for key in columns} for row in rows], columns=list(columns))
