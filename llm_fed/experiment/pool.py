"""What a finished run offers to a client that was never part of it: adapters that may be merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fed import kinds, methods
from llm_fed.basics.errors import UserError
from llm_fed.bench.parents import config_of
from llm_fed.export import peft_folders
from llm_fed.method import Method
from llm_fed.models.base import Base
from llm_fed.models.structure import Structure
from llm_fed.runs.checkpoint import Checkpoints, check_kept
from llm_fed.runs.reading import exported, finished
from llm_fed.settings.config import Config
from llm_fed.state import State


@dataclass(frozen=True)
class Pool:
    """Adapters of one structure, by name."""

    members: dict[str, State]
    structure: Structure
    what: str  # they are, in words


def check(folder: Path, config: Config) -> None:
    """Refuse a run that has nothing to offer, before its base is loaded. UserError: why, and what to do."""
    finished(folder)
    if config.adapter is None:
        raise UserError(f"{folder} trained whole image models; only adapters of language models can be joined")
    kinds.check_writes(config, f"{folder} trained {{noun}}s; only adapters of language models can be joined")
    folder, config, _ = _federation(folder, config)
    if type(methods.build(config.method)).pool is Method.pool:
        exported(folder)


def read(folder: Path, config: Config, base: Base) -> Pool:
    """The server's models where the method has several (`Method.pool`), and otherwise the clients' personal adapters,
    of which one will do where all have the same; of a merge those of its federated parent. UserError: there are none,
    or they cannot be merged with each other. RunError: the checkpoint that holds the server's models is damaged."""
    folder, config, requested = _federation(folder, config)
    method, name, round = methods.build(config.method), config.method["name"], finished(folder)["round"]
    if type(method).pool is not Method.pool:
        structure = method.wrap(base.structure(config.adapter), None)
        assert structure.plain  # they are merged as they are
        models = method.pool(_server_state(folder, round))
        members = {f"model {j}": model for j, model in enumerate(models)}
        return Pool(members, structure, f"the {len(models)} models of {name}'s server after round {round}")
    if requested is not None:
        structure = base.structure(config.adapter)
        model = method.broadcast(_server_state(folder, requested), "")
        return Pool({name: model}, structure, f"the adapter of {name} after round {requested}")
    paths = exported(folder)
    if method.one_model:
        paths = {name: next(iter(paths.values()))}
    read = {client: peft_folders.read(path, base) for client, path in paths.items()}
    first = next(iter(read.values()))[1]
    for client, (_, structure) in read.items():
        if not structure.plain:
            raise UserError(
                f"{folder} gives each client several adapters with a gate of its own, which cannot be merged; join a "
                "run of a method that gives one, such as fedmerge or fedit"
            )
        if (structure.rank, structure.scaling) != (first.rank, first.scaling):
            raise UserError(
                f"{folder} has adapters of different rank or scaling (of {next(iter(read))} and of {client}), which "
                "cannot be merged; join a run whose clients have one rank"
            )
    members = {client: state for client, (state, _) in read.items()}
    whose = f"the adapters of the {len(paths)} clients of {name} after round {round}"
    return Pool(members, first, f"the adapter of all clients of {name}" if method.one_model else whose)


def _federation(folder: Path, config: Config) -> tuple[Path, Config, int | None]:
    """The federation whose models are offered: the run itself, or the first parent of a merge; its configuration, and
    the round that is merged, if that is requested."""
    for parent in methods.build(config.method).parents[:1]:
        inside = folder / "needs" / parent.name
        if not (inside / "config.yaml").is_file():
            raise UserError(
                f"{folder} merges adapters of a run of {parent.name} that is in another folder; give that folder to "
                "llm-fed join"
            )
        exported(inside)
        return inside, config_of(parent.name, config), parent.round
    return folder, config, None


def _server_state(folder: Path, round: int) -> Any:
    check_kept(folder, round)
    return Checkpoints(folder / "checkpoints", beside=True).load(round).state["state"]
