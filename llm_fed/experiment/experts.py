"""How much each expert counts: what routers, gates and mixtures of personal models make of the test examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llm_fed.basics.figures import rounded
from llm_fed.bench.build import Experiment
from llm_fed.method.site import Site
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.runs.folder import EXPERTS, Run
from llm_fed.state import State

MAX_CLIENTS = 200  # of more, the first: the report shows a row for each
MAX_EXAMPLES = 50  # of each client, its first test examples

WEIGHED = ("gate", "logits", "probabilities")  # answers of whole models side by side that weigh them


def write(experiment: Experiment, run: Run, personal: Mapping[str, State]) -> None:
    """Write `experts.jsonl`, a line per client: the mean weight of each expert over its first test examples, and its
    standard deviation over them (population's); None where the weights are the same for all. A method whose personal
    models weigh nothing has no such file.

    Args:
        personal: the personal model of each client that has test examples.

    Raises:
        RunError: the disk is full.
    """
    asked = {id: site for id, site in experiment.scored.items() if names_of(site.structure) and _examples(site)}
    asked = dict(list(asked.items())[:MAX_CLIENTS])
    found = experiment.runtime.run({id: _weights(site, personal[id]) for id, site in asked.items()})
    lines = []
    for id, site in asked.items():
        weights = found[id]
        if isinstance(weights, Exception):
            raise weights
        names, alike = names_of(site.structure), weights.ndim == 1
        mean = weights if alike else weights.mean(0)
        std = None if alike else _by_name(names, weights.std(0, correction=0))
        examples = len(_examples(site)) if alike else len(weights)
        lines.append({"client": id, "examples": examples, "mean": _by_name(names, mean), "std": std})
    if lines:
        run.write_lines(EXPERTS, lines)
    else:
        run.forget(EXPERTS)


def names_of(structure: Structure) -> tuple[str, ...]:
    """The experts that a structure weighs; none where it weighs nothing."""
    if isinstance(structure, Lora):
        return () if structure.gate == "sum" else structure.experts
    return tuple(name for name, _ in structure.parts) if structure.answer in WEIGHED else ()


async def _weights(site: Site, state: State) -> Tensor:
    """(N, E) of its test examples, or (E,) where they do not depend on the example."""
    if isinstance(site.structure, Lora):
        return (await site.expert_weights(state, _examples(site))).double()
    if site.structure.answer == "gate":
        gate = (await site.answers(state, _examples(site))).gate
        assert gate is not None
        return gate.double()
    return state["weights"].double()


def _examples(site: Site) -> list[Any]:
    """Pictures, or prompts with their first answers as training would see them; those that are too long are left
    out."""
    queries = site.data.queries.get("test", ())
    if site.data.num_labels:
        return list(queries[:MAX_EXAMPLES])
    return [query.example for query in queries if query.example is not None][:MAX_EXAMPLES]


def _by_name(names: tuple[str, ...], values: Tensor) -> dict[str, float]:
    return {name: rounded(float(value)) for name, value in zip(names, torch.atleast_1d(values), strict=True)}
