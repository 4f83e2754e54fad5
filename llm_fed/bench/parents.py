"""The runs whose models a merge starts from: their configurations, and each client's model in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.bench import start
from llm_fed.export import models
from llm_fed.federation.clients import Messages
from llm_fed.federation.progress import restore
from llm_fed.kinds import Kind
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.method.requests import succeeded
from llm_fed.runs.checkpoint import Checkpoints, check_kept
from llm_fed.runs.reading import exported
from llm_fed.runtime.local import LocalRuntime
from llm_fed.settings.config import Config, ExportConfig, StopConfig
from llm_fed.state import State


def check(config: Config, method: Method) -> None:
    """Refuse a configuration with which a parent would not be what is requested. UserError: privacy, which merging does
    not keep, or a round of which no checkpoint is kept; what to set."""
    for parent in method.parents:
        if config.privacy.clip is not None:
            raise UserError(
                f"privacy.clip is for methods with rounds, but {config.method['name']} merges finished runs; set it to "
                "null"
            )
        round, kept = parent.round, (config.rounds, *config.checkpoint.keep_rounds)
        if round is not None and not (round in kept and 1 <= round <= config.rounds):
            raise UserError(
                f"{config.method['name']} asks for round {round} of {parent.name}, of which rounds={config.rounds} "
                f"keeps no checkpoint; set checkpoint.keep_rounds=[{round}], and rounds to at least {round}"
            )


def config_of(name: str, config: Config) -> Config:
    """The configuration of the parent of this name: that of the merge, with the parent's own method.

    It exports every client's model where that is what is merged, rather than a checkpoint's. UserError: the run has no
    such parent.
    """
    for parent in methods.build(config.method).parents:
        if parent.name == name:
            config = replace(config, method={"name": name, **parent.settings})
            if parent.round is None:
                return replace(config, export=ExportConfig())
            return replace(config, stop=StopConfig())  # it has to reach that round
    raise UserError(f"{config.method['name']} merges no run of {name!r}")


def states_of_run(
    folder: Path, round: int | None, config: Config, base: Kind, clients: Mapping[str, Client], runtime: LocalRuntime
) -> dict[str, State]:
    """The personal model of each of `clients` in a run. UserError: the run has no such round or client, or its adapters
    are none of this base. RunError: the checkpoint is damaged. `round`: of which round; None: as exported, that is, of
    the round that the run selected. `config`: the run's own."""
    structure = base.structure(config.adapter)
    if round is None:
        return {id: models.read(own, structure, base) for id, own in exported(folder, [*clients]).items()}
    checkpoints = Checkpoints(folder / "checkpoints", beside=True)
    check_kept(folder, round)
    method = methods.build(config.method)
    sites = {}
    for id, site in clients.items():
        wrapped = method.wrap(structure, site)
        if not wrapped.plain or wrapped.delta:
            raise UserError(f"the run {folder} gives client {id} more than one adapter; only plain ones can be merged")
        sites[id] = replace(site, structure=wrapped, draw=partial(base.draw, wrapped), memory={})
    if config.start:
        start.give(config, method, sites.values(), base)
    messages = Messages(method, restore(checkpoints.load(round), sites).state, sites, config.transport)
    return succeeded(runtime.run({id: method.personalize(site, messages[id]) for id, site in sites.items()}))
