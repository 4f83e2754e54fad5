"""The quickstart: local, FedIT and FedMerge on a planted federation, with the base that llm_fed ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_fed.eval.merges import weights_after
from llm_fed.eval.plots import plot_weights
from llm_fed.experiment import run as experiment
from llm_fed.experiment.baselines import Baselines
from llm_fed.experiment.simulation import Simulation
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.tasks import synthetic

ASSETS = Path(__file__).parents[1] / "assets"
METHODS = ("local", "fedit", "fedmerge")


def run(folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Train the three methods into `folder/<method>` and draw the weights of FedMerge's tested round beside them.
    Returns each method's summary."""
    experiment.quiet()
    reporter, baselines = Reporter(), Baselines()
    results = {}
    for method in METHODS:
        resolved = configfile.load(ASSETS / "quickstart.yaml", [f"seed={seed}", f"base.name={ASSETS / 'tiny-base'}"])
        if method != resolved.method["name"]:
            resolved = configfile.from_dict({**configfile.as_dict(resolved), "method": {"name": method}})
        results[method] = experiment.train(
            resolved, folder / method, reporter=reporter, mode=Simulation(baselines=baselines)
        )
    weights = weights_after(read_records(folder / "fedmerge" / "metrics.jsonl"), results["fedmerge"]["round"])
    assert weights is not None  # FedMerge reports them every round
    groups = [f"group {synthetic.group(client) + 1}" for client in weights["clients"]]
    plot_weights(folder / "merging_weights.png", weights["clients"], weights["values"], groups=groups)
    return results
