"""Merging after training: a federated and a local adapter, from finished runs or from any two PEFT folders."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llm_fed import kinds, methods, tasks
from llm_fed.basics import documents
from llm_fed.basics.errors import UserError, require
from llm_fed.bench.build import Experiment, prepare
from llm_fed.bench.parents import states_of_run
from llm_fed.commands import merge_output
from llm_fed.commands.evaluate import EvaluationData, examples_of, lay_over
from llm_fed.eval.merges import draw_curves
from llm_fed.experiment import splits
from llm_fed.experiment.merging import merge
from llm_fed.experiment.rounds import best_round, models_at
from llm_fed.export import models, peft_folders
from llm_fed.export.card import model_card
from llm_fed.export.origins import as_trained, check_text, common_base, read_origin, say_differences
from llm_fed.export.peft_settings import CONFIG
from llm_fed.kinds import Kind
from llm_fed.models.lora import Lora, adapted
from llm_fed.models.origin import Origin
from llm_fed.models.prompt import Prompt, prompt_for
from llm_fed.runs.checkpoint import BEST, Place, rounds_in
from llm_fed.runs.reading import read_config, saved_summary
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.settings.configfile import as_dict, from_dict, keys_of
from llm_fed.state import FACTORS, State, factor_of
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.record import Record, together
from llm_fed.tasks.splits import ByContent

OPTIONS = ("--fed", "--local")  # the two parents, in their order

# Two adapters of one initialisation have A's that lie close, two of independent ones are sqrt(2) = 1.41 apart (the
# distance relative to their own length). At 1.0 they share half of their direction.
UNRELATED = 1.0


@dataclass(frozen=True)
class MergeParent:
    """One of the two parents: a run, at a round or as exported, or a PEFT folder."""

    folder: Path
    round: int | str | None  # `BEST`, or its number
    config: Config | None  # of a run

    @classmethod
    def parse(cls, option: str, text: str) -> MergeParent:
        """From `DIR`, `DIR@ROUND` or `DIR@best`."""
        location = Place.parse(text)
        path, round = location.folder, location.round
        if (path / "checkpoints").is_dir():
            return cls(path, round, read_config(path))
        if not (path / CONFIG).is_file():
            raise UserError(f"{option} {path} is neither a run folder nor a PEFT folder ({CONFIG})")
        if round is not None:
            raise UserError(f"{option} {text}: a PEFT folder has no rounds; give {path}")
        return cls(path, None, None)

    @cached_property
    def origin(self) -> Origin | None:
        """The base that the adapter was made for, and how it was loaded; None where the folder does not say it."""
        return Origin.of(self.config.base) if self.config else read_origin(self.folder)

    def structure(self, base: Kind) -> Any:
        if self.config is None:
            read = peft_folders.read(self.folder, base)[1]
            peft_folders.check_head(self.folder, read, base)
            return read
        found = base.structure(self.config.adapter)
        if not found.fused:
            raise UserError(f"{self.folder} trained whole models (adapter: null); only adapters can be merged")
        return found

    def prompt(self, base: Kind) -> Prompt | None:
        """How its prompts are put; None of a folder that does not say so."""
        return base.prompt_of(self.config) if self.config else prompt_for(base, self.folder)

    def states(self, experiment: Experiment) -> dict[str, State]:
        """The adapter for each client of the experiment."""
        if self.config is None:
            return dict.fromkeys(experiment.clients, peft_folders.read(self.folder, experiment.base)[0])
        if self.round is None:
            return states_of_run(
                self.folder, None, self.config, experiment.base, experiment.clients, experiment.runtime
            )
        found = models_at(self.folder, self.round, base=experiment.base)
        for id in experiment.clients:
            if id not in found.states:
                raise UserError(f"the run {self.folder} has no client {id}")
            its = found.experiment.scored[id].structure
            if not its.plain or its.delta:
                raise UserError(
                    f"the run {self.folder} gives client {id} more than one adapter; only plain ones can be merged"
                )
        return {id: found.states[id] for id in experiment.clients}

    @cached_property
    def number(self) -> int | None:
        """Which round of a run it is; None where that is not known."""
        if self.config is None:
            return None
        if self.round == BEST:
            return best_round(self.folder, self.config, max(rounds_in(self.folder / "checkpoints"), default=0))
        if self.round is not None:
            return int(self.round)
        return (saved_summary(self.folder) or {}).get("round")

    def __str__(self) -> str:
        return f"{self.folder}" + ("" if self.round is None else f"@{self.round}")


@dataclass(frozen=True)
class Merged:
    """One client's merged adapter."""

    client: str
    folder: Path
    recipe: dict[str, Any]


def merge_adapters(
    settings: Mapping[str, Any],
    fed: str,
    local: str,
    out: Path,
    *,
    base: str | None = None,
    data: EvaluationData | None = None,
    client: str | None = None,
    words: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> list[Merged]:
    """Merge two adapters, for one client or all, into PEFT folders `out/<client>`. Of a run's clients, `out` is then
    also the folder of a finished run, with their test scores.

    Args:
        settings: of a merger, with its name (`methods.merger`).
        fed, local: the two adapters, each DIR or DIR@ROUND.
        base: instead of the base that they name.
        data: for two PEFT folders, from whose examples the weights come; a run brings its clients' examples.
        client: only this one.
        words: `key=value` words laid over the configuration, of the run or of this merge, see `evaluate.lay_over`.

    Raises:
        UserError: the adapters do not belong together, or there is no data to weigh them by.
    """
    reporter = reporter or Reporter()
    merge_output.check_place(out)
    kind = methods.merger(settings["name"])
    sources = {option: MergeParent.parse(option, text) for option, text in zip(OPTIONS, (fed, local), strict=True)}
    name = base or common_base({option: source.origin for option, source in sources.items()})
    if not name:
        raise UserError("neither adapter names its base; give --base NAME")
    runs = [source.config for source in reversed(sources.values()) if source.config]
    data = data or EvaluationData()
    words = [*([f"task.template={data.template}"] if data.template else []), *words]
    keys = {*keys_of(words, "the method"), *(["base.dtype"] if data.dtype else [])}
    for key, instead in (("base.name", "--base NAME"), ("method.name", "the method's name as the first word")):
        if key in keys:
            raise UserError(f"{key} cannot be set here; give {instead}")
    if runs and (data.task or data.path):
        raise UserError("--task and --data only work with two PEFT folders; leave them out, as a run brings its own")
    config = replace(runs[0], method=dict(settings)) if runs else _config(settings, name, data)
    config = lay_over(config, words, "the method", also=("method.",))
    config = replace(config, base=replace(config.base, name=name))
    if not runs:
        first = next((source.origin for source in sources.values() if source.origin), None)
        config = replace(config, base=as_trained(config.base, first, keys, reporter.note))
        task_name = config.task.name if "task.name" in keys else data.task
        data = replace(data, task=task_name, path=Path(config.task.path) if config.task.path else None)
        for source in sources.values() if not data.task else ():
            check_text(source.folder, config.base)
        if not (kind.merger.data_free or data.task or data.path):
            raise UserError(
                "the mixing weight is computed from examples; give --data FILE, or --task NAME with --client"
            )
    if runs or data.task:
        task = tasks.load(config.task, config.federation_seed, config.evaluation_seed, _known(sources))
    else:
        task = _one_client(data.path, config.task, _known(sources))
    loaded: Any = kinds.load(config, task, choose_device(config.device))
    loaded, config, said = loaded.as_said(config, lambda: _said(sources, loaded, keys, reporter), keys)
    adapter = _common_structure(sources, loaded).as_config()
    experiment = prepare(config if runs else replace(config, adapter=adapter), reporter, base=loaded, task=task)
    if runs:
        experiment.clients = experiment.trainers  # the others have no adapter of their own
    _choose(experiment, client, every=bool(runs))
    method = experiment.method
    parents = {parent.name: source for parent, source in zip(method.parents, sources.values(), strict=True)}
    given = {name: source.states(experiment) for name, source in parents.items()}
    distances = {id: round(distance(*(states[id] for states in given.values())), 4) for id in experiment.clients}
    if (apart := max(distances.values())) > UNRELATED:
        reporter.note(
            f"warning: the A matrices of {fed} and {local} are {apart:.2f} apart (0: equal, 1.41: "
            "unrelated), so the two adapters hardly share an initialisation, and their mixture is often worse than "
            "either; train both with the same seed"
        )
    merge(experiment, given)
    prompt = experiment.base.prompt_of(experiment.config) if said or "task.template" in keys else None
    states = experiment.runtime.run({id: method.personalize(site, None) for id, site in experiment.clients.items()})
    origin = {"fed": str(sources["--fed"]), "local": str(sources["--local"])}
    origins = {id: origin | {"distance": distances[id]} for id in experiment.clients}
    merge_output.clear(out)
    merged = _write(experiment, out, states, origins, prompt)
    recipes = {item.client: item.recipe for item in merged}
    if runs:
        rounds = {name: source.number for name, source in parents.items() if source.number is not None}
        merge_output.write(experiment, out, states, recipes, rounds, _known(sources))
    draw_curves(recipes, experiment.metric, out / "curves.png")
    return merged


def _one_client(path: Path | None, task: TaskConfig, known: Record | None) -> TaskData:
    """The one client of a file of examples, or one without any. `known`: rows of which none is held out that was
    trained on."""
    if path is None:
        return TaskData("files", "rouge1", {"merged": ClientData("merged", (), ())})
    client = examples_of(path, task)
    (divided,) = ByContent(0, known).hold_out([ClientData(client.client, client.test)], "validation", 0.1)
    return TaskData("files", "rouge1", {client.client: divided})


def _known(sources: Mapping[str, MergeParent]) -> Record | None:
    """The rows that the parents know, where they are runs or lie in the folder of one."""
    records = [splits.recall_around(source.folder) for source in sources.values()]
    return together([record for record in records if record is not None])


def distance(fed: State, local: State) -> float:
    """How far apart the A's of two adapters are, relative to their length: 0 equal, sqrt(2) independent draws."""
    names = [name for name in fed if factor_of(name) == FACTORS[0]]
    one, other = fed.pick(names), local.pick(names)
    length = math.hypot(one.norm(), other.norm()) / math.sqrt(2)
    return (one - other).norm() / length if length else 0.0


def _said(sources: Mapping[str, MergeParent], base: Kind, keys: Collection[str], reporter: Reporter) -> Prompt | None:
    """How the parents' prompts are put; of two that differ where that can be, a run's before a folder's.

    Raises:
        UserError: they were trained with different templates, and none is given.
    """
    # The configuration of a merge is that of the local run, or else of the federated one, which hence comes first.
    order = [option for option in ("--local", "--fed") if sources[option].config]
    order += [option for option in ("--fed", "--local") if not sources[option].config]
    said = {option: prompt for option in order if (prompt := sources[option].prompt(base)) is not None}
    silent = " and ".join(str(source) for option, source in sources.items() if option not in said)
    if "task.template" not in keys:
        if len({(prompt.template.text, prompt.template.date) for prompt in said.values()}) > 1:
            raise UserError(
                f"--fed was trained with the prompt template {said['--fed'].template.name!r} and --local with "
                f"{said['--local'].template.name!r}; --template NAME says which one the merged adapter is for"
            )
        if silent:
            used = next((prompt.template.name for prompt in said.values()), TaskConfig.template)
            reporter.note(f"{silent} does not name its prompt template, so {used} is used; --template chooses another")
    say_differences(said, {option: sources[option].origin for option in order}, reporter.note, keys)
    return next(iter(said.values()), None)


def _common_structure(sources: Mapping[str, MergeParent], base: Kind) -> Lora:
    """What both parents are, refusing those that do not fit each other. Two that name their layers in different ways
    are alike if these are the same."""
    structures = {option: source.structure(base) for option, source in sources.items()}
    fed, local = structures.values()
    if fed.dora or local.dora:
        raise UserError(
            "--fed and --local are DoRA adapters, whose magnitudes no merge can weigh; train with adapter.dora=false, "
            "or use one of the two as it is"
        )
    layers = {option: adapted(base.model, structure) for option, structure in structures.items()}
    for option, other in (OPTIONS, OPTIONS[::-1]):
        if alone := [layer for layer in layers[option] if layer not in layers[other]]:
            raise UserError(
                f"--fed and --local have different layers: {alone[0]} is one of {option} alone; llm-fed merge FOLDER "
                "FOLDER --method linear (or ties, ...) merges them without examples"
            )
    if not (fed.rank == local.rank and math.isclose(fed.scaling, local.scaling)):
        what = "rank" if fed.rank != local.rank else "scaling"
        raise UserError(
            f"--fed and --local have different {what} ({getattr(fed, what)} and {getattr(local, what)}); llm-fed merge "
            "FOLDER FOLDER --method linear (or ties, ...) merges them without examples"
        )
    return fed


def _config(settings: Mapping[str, Any], base: str, data: EvaluationData) -> Config:
    """The configuration of a merge of two PEFT folders, whose structure is still to be read."""
    return from_dict(
        {
            "base": {"name": base, "dtype": data.dtype or "float32"},
            "task": {"name": data.task or "files", "path": str(data.path) if data.path else None},
            "method": dict(settings),
            "eval": {"metric": None},
        }
    )


def _choose(experiment: Experiment, client: str | None, every: bool) -> None:
    """Keep the client that is requested."""
    if client is not None:
        require("--client", client, experiment.clients)
        experiment.clients = {client: experiment.clients[client]}
    elif not every and len(experiment.clients) > 1:
        raise UserError(f"the task has several clients; give --client, one of {', '.join(experiment.clients)}")


def _write(
    experiment: Experiment,
    out: Path,
    states: Mapping[str, State],
    origins: Mapping[str, Mapping[str, Any]],
    prompt: Prompt | None,
) -> list[Merged]:
    config, method = experiment.config, experiment.method
    text = documents.dump(as_dict(config))
    merged = []
    for id, site in experiment.clients.items():
        recipe = {**origins[id], **method.recipe(site)}
        described = models.described(site.structure, experiment.base, site.data.num_labels, prompt)
        card = model_card(
            described, client=id, method=config.method["name"], paper=method.paper, metrics={}, config=text,
            recipe=recipe,
        )  # fmt: skip
        models.write(out / id, states[id], site.structure, experiment.base, card, prompt)
        merged.append(Merged(id, out / id, recipe))
    return merged
