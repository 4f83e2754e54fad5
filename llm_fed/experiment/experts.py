"""How much each expert counts: what routers, gates and mixtures of personal models make of the test examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from llm_fed.basics.figures import rounded
from llm_fed.bench.build import Experiment
from llm_fed.kinds import Kind
from llm_fed.method.site import Site
from llm_fed.runs.folder import EXPERTS, Run
from llm_fed.state import State

MAX_CLIENTS = 200  # of more, the first: the report shows a row for each
MAX_EXAMPLES = 50  # of each client, its first test examples


def write(experiment: Experiment, run: Run, personal: Mapping[str, State]) -> None:
    """Write `experts.jsonl`, a line per client: the mean weight of each expert over its first test examples, and its
    standard deviation over them (population's); None where the weights are the same for all. A method whose personal
    models weigh nothing has no such file.

    Args:
        personal: the personal model of each client that has test examples.

    Raises:
        RunError: the disk is full.
    """
    weighing = {id: site for id, site in experiment.scored.items() if site.structure.weighed}
    given = {id: _examples(experiment.base, site) for id, site in weighing.items()}
    asked = dict([(id, examples) for id, examples in given.items() if examples][:MAX_CLIENTS])
    weights_of = experiment.runtime.run({id: _weights(weighing[id], personal[id], asked[id]) for id in asked})
    lines = []
    for id in asked:
        weights = weights_of[id]
        if isinstance(weights, Exception):
            raise weights
        names, alike = weighing[id].structure.weighed, weights.ndim == 1
        mean = weights if alike else weights.mean(0)
        std = None if alike else _by_name(names, weights.std(0, correction=0))
        examples = len(asked[id]) if alike else len(weights)
        lines.append({"client": id, "examples": examples, "mean": _by_name(names, mean), "std": std})
    if lines:
        run.write_lines(EXPERTS, lines)
    else:
        run.forget(EXPERTS)


async def _weights(site: Site, state: State, examples: Sequence[Any]) -> Tensor:
    """(N, E) of its test examples, or (E,) where they do not depend on the example."""
    if site.structure.fused:
        return (await site.expert_weights(state, examples)).double()
    if "weights" in state.layout.slices:
        return state["weights"].double()
    gate = (await site.answers(state, examples)).gate
    assert gate is not None
    return gate.double()


def _examples(base: Kind, site: Site) -> list[Any]:
    """Its test examples as training would see them; those that are too long are left out."""
    queries = (base.trained_form(query) for query in site.data.queries.get("test", ()))
    return list(islice((example for example in queries if example is not None), MAX_EXAMPLES))


def _by_name(names: tuple[str, ...], values: Tensor) -> dict[str, float]:
    return {name: rounded(float(value)) for name, value in zip(names, torch.atleast_1d(values), strict=True)}
