"""The verdict on runs that are finished: their folders, grouped by everything but the seeds; and tables of scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fed.basics.errors import UserError
from llm_fed.basics.files import write_result
from llm_fed.eval.plots import plot_verdict
from llm_fed.eval.verdict import Scored, Verdict
from llm_fed.experiment import splits
from llm_fed.runs.reading import finished, read_config, shares_of
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, flat
from llm_fed.tasks import natural

if TYPE_CHECKING:
    import pandas as pd

# What is no difference between methods: seeds, what is kept of a run, and where it was computed.
_APART = (
    "seed", "seeds.federation", "seeds.training", "checkpoint.", "export.", "track.", "network.", "eval.base",
    "eval.cross", "device", "clients_per_pass", "eval.batch_size",
)  # fmt: skip
# What must agree for scores to be comparable, beside the metric.
_ALIKE = ("task.", "eval.limit", "eval.select", "eval.during", "seeds.evaluation")


@dataclass(frozen=True)
class _FinishedRun:
    folder: Path
    config: Config
    summary: dict[str, Any]

    @property
    def clients(self) -> dict[str, float]:
        return dict(self.summary["scores"].get("clients", {}))


def compare_runs(folders: Sequence[Path]) -> Verdict:
    """The verdict on finished runs, paired by the federation's and the training's seed. UserError: a folder is no
    finished run, or runs cannot be compared; it says which."""
    runs = [_FinishedRun(folder, read_config(folder), finished(folder)) for folder in dict.fromkeys(folders)]
    settings = (flat(as_dict(run.config)) for run in runs)
    values = [{key: value for key, value in each.items() if not _among(key, _APART)} for each in settings]
    _check(runs, values)
    groups: dict[str, dict[tuple[int, int], _FinishedRun]] = {}
    for run, label in zip(runs, _labels(values), strict=True):
        cell = run.config.federation_seed, run.config.training_seed
        if (other := groups.setdefault(label, {}).setdefault(cell, run)) is not run:
            raise UserError(
                f"{run.folder} and {other.folder} have the same settings and the same seeds; give only one of them"
            )
    if len(groups) < 2:
        raise UserError(
            f"these {len(runs)} runs differ only in their seeds; give runs of at least two methods or settings"
        )
    everybody: dict[int, set[str]] = {}  # by federation the clients that all of its runs score
    for run in runs:
        everybody.setdefault(run.config.federation_seed, {*run.clients}).intersection_update(run.clients)
    scored = {
        label: [_tested(run, everybody[run.config.federation_seed]) for run in of_label.values()]
        for label, of_label in groups.items()
    }
    return Verdict.of_runs(scored, natural=all(natural(run.config.task) for run in runs))


def read_scores(path: Path) -> pd.DataFrame:
    """A CSV file with a line per score, for `llm_fed.verdict`. UserError where it cannot be read."""
    import pandas as pd

    try:
        missing = {"score": ["", "NA", "NaN", "nan", "None"]}  # but a client may be called NA
        texts = dict.fromkeys(("row", "draw", "client"), str)
        return pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=missing)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as CSV with the columns row,draw,client,score: {error}") from error


def write(verdict: Verdict, out: Path) -> str:
    """verdict.md and, where there is an interval, verdict.png in a folder; that, in words. RunError: they cannot be
    written."""
    write_result(out / "verdict.md", verdict.as_markdown().lstrip().encode())
    if not verdict.column.known:
        return f"verdict.md is in {out}"
    plot_verdict(out / "verdict.png", verdict.column)
    return f"verdict.md and verdict.png are in {out}"


def _among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def _check(runs: Sequence[_FinishedRun], values: Sequence[dict[str, Any]]) -> None:
    metrics = (run.summary["scores"].get("metric") or run.config.eval.metric for run in runs)
    alike = [{"metric": metric, **its} for metric, its in zip(metrics, values, strict=True)]
    for run, its in zip(runs, alike, strict=True):
        for key in ("metric", *(key for key in alike[0] | its if _among(key, _ALIKE))):
            if (first := alike[0].get(key)) != its.get(key):
                raise UserError(
                    f"{runs[0].folder} and {run.folder} cannot be compared: {key} is {first!r} and {its.get(key)!r}; "
                    "give runs with the same data, scored alike"
                )
    by_seed: dict[int, _FinishedRun] = {}
    for run in runs:
        other = by_seed.setdefault(run.config.federation_seed, run)
        if (
            run.config.evaluation_seed != other.config.evaluation_seed
            or _trained(run) != _trained(other)
            or splits.tested_alike(run.folder, other.folder) is False
        ):
            raise UserError(
                f"{other.folder} and {run.folder} have the same federation seed but other clients or other test "
                "examples; give runs with the same data and seeds.evaluation"
            )


def _trained(run: _FinishedRun) -> set[str]:
    """The clients with a score but those that have no training example, which not every method scores."""
    return run.clients.keys() - set(run.summary.get("only_tested", ()))


def _labels(values: Sequence[dict[str, Any]]) -> list[str]:
    """Of each run the method's name and in what it differs from others, `fedmerge num_models=4 local.lr=0.1`; a
    method's settings are compared with those of runs of the same method."""

    def differing(of: Sequence[dict[str, Any]]) -> list[str]:
        return sorted(key for key in set().union(*of) if len({repr(value.get(key)) for value in of}) > 1)

    everywhere = [key for key in differing(values) if not key.startswith("method.")]
    labels = []
    for value in values:
        own = differing([other for other in values if other["method.name"] == value["method.name"]])
        settings = [key for key in own if key.startswith("method.")]
        words = [f"{key.removeprefix('method.')}={value.get(key)}" for key in (*settings, *everywhere)]
        labels.append(" ".join([str(value["method.name"]), *words]))
    return labels


def _tested(run: _FinishedRun, everybody: Collection[str]) -> Scored:
    rule = run.summary.get("rule", {"clients": {}})["clients"]
    clients, ruled = ({id: score for id, score in of.items() if id in everybody} for of in (run.clients, rule))
    seeds = run.config.federation_seed, run.config.training_seed
    return Scored(*seeds, clients, ruled or None, splits.tested(run.folder), shares_of(run.summary))
