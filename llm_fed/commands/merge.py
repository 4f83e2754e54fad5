"""Merging after training: a federated and a local adapter, from finished runs or from any two PEFT folders."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llm_fed import kinds, methods, tasks
from llm_fed.basics import checksum, signs
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, require
from llm_fed.basics.files import write_result
from llm_fed.bench.build import Experiment, prepare
from llm_fed.bench.parents import states_of_run
from llm_fed.commands.evaluate import alone_config, examples_of, lay_over
from llm_fed.eval.merges import draw_curves
from llm_fed.experiment import splits
from llm_fed.experiment.merging import merge, write_adapter
from llm_fed.experiment.rounds import opened
from llm_fed.export import peft_folders
from llm_fed.export.origins import as_trained, check_text, common_base, read_origin, say_differences
from llm_fed.export.peft_settings import CONFIG
from llm_fed.kinds import Kind
from llm_fed.models.lora import Lora, adapted
from llm_fed.models.origin import Origin
from llm_fed.models.prompt import Prompt, prompt_for
from llm_fed.runs.checkpoint import Place
from llm_fed.runs.folder import CROSS, SPLITS, config_text
from llm_fed.runs.reading import HERE, read_config, saved_summary
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.settings.configfile import keys_of
from llm_fed.state import FACTORS, State, factor_of
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.record import Record, together
from llm_fed.tasks.splits import ByContent

OPTIONS = ("--fed", "--local")  # the two parents, in their order
RUN_FILES = ("config.yaml", "metrics.jsonl", SPLITS, "summary.json")  # the last one makes it a finished run

# Two adapters of one initialisation have A's that lie close, two of independent ones are sqrt(2) = 1.41 apart (the
# distance relative to their own length). At 1.0 they share half of their direction.
UNRELATED = 1.0


@dataclass(frozen=True)
class MergeParent:
    """One of the two parents: a run, at a round or as exported, or a PEFT folder."""

    place: Place
    config: Config | None  # of a run

    @classmethod
    def parse(cls, option: str, text: str) -> MergeParent:
        """From `DIR`, `DIR@ROUND` or `DIR@best`."""
        place = Place.parse(text)
        if (place.folder / "checkpoints").is_dir():
            return cls(place, read_config(place.folder))
        if not (place.folder / CONFIG).is_file():
            raise UserError(f"{option} {place.folder} is neither a run folder nor a PEFT folder ({CONFIG})")
        if place.round is not None:
            raise UserError(f"{option} {text}: a PEFT folder has no rounds; give {place.folder}")
        return cls(place, None)

    @cached_property
    def origin(self) -> Origin | None:
        """The base that the adapter was made for, and how it was loaded; None where the folder does not say it."""
        return Origin.of(self.config.base) if self.config else read_origin(self.place.folder)

    def structure(self, base: Kind) -> Lora:
        folder = self.place.folder
        if self.config is None:
            read = peft_folders.read(folder, base)[1]
            peft_folders.check_head(folder, read, base)
            return read
        found = base.structure(self.config.adapter)
        if not isinstance(found, Lora):
            raise UserError(f"{folder} trained whole models (adapter: null); only adapters can be merged")
        return found

    def prompt(self, base: Kind) -> Prompt | None:
        """How its prompts are put; None of a folder that does not say so."""
        return base.prompt_of(self.config) if self.config else prompt_for(base, self.place.folder)

    def states(self, experiment: Experiment) -> tuple[dict[str, State], int | None]:
        """The adapter for each client of the experiment, and of which round of a run they are."""
        base, clients = experiment.base, experiment.clients
        if self.config is None:
            return dict.fromkeys(clients, peft_folders.read(self.place.folder, base)[0]), None
        with opened(str(self.place), everybody=True) as view:
            states = states_of_run(view, None, self.config, base, clients, experiment.runtime)
            return states, (saved_summary(view) or {}).get("round")


Parents = dict[str, MergeParent]  # by option


def merge_adapters(
    method: str,
    fed: str,
    local: str,
    out: Path,
    *,
    base: str | None = None,
    client: str | None = None,
    words: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Merge two adapters, for one client or all, into PEFT folders `out/<client>`. Of a run's clients, `out` is then
    also the folder of a finished run, with their test scores. Returns by client how its adapter was made. UserError:
    the adapters do not belong together, or there is no data to weigh them by.

    Args:
        method: the name of a merger (`methods.merger`); `words` have its settings.
        fed, local: the two adapters, each DIR or DIR@ROUND.
        base: instead of the base that they name.
        client: only this one.
        words: `key=value` words laid over the configuration, of the run or of this merge, see `evaluate.lay_over`. Of
            two PEFT folders they say from whose examples the weights come; a run brings its clients' examples.
    """
    reporter = Reporter()
    if (out / "checkpoints").exists():
        raise UserError(f"{out} is the folder of a run, whose files the merge would replace; give another --out")
    methods.merger(method)  # its name is checked before the folders are read
    parents = {option: MergeParent.parse(option, text) for option, text in zip(OPTIONS, (fed, local), strict=True)}
    records = [splits.recall_around(parent.place.folder) for parent in parents.values()]
    known = together([record for record in records if record is not None])
    config, keys = _config(method, parents, base, words, reporter)
    runs = any(parent.config for parent in parents.values())
    if runs or "task.name" in keys:
        task = tasks.load(config.task, config.federation_seed, config.evaluation_seed, known)
    else:
        task = _one_client(config.task, known)
    experiment, prompt = _experiment(config, keys, parents, task, reporter)
    if client is not None:
        require("--client", client, experiment.clients)
        experiment.clients = {client: experiment.clients[client]}
    elif not runs and len(experiment.clients) > 1:
        raise UserError(f"the task has several clients; give --client, one of {', '.join(experiment.clients)}")
    given, rounds = {}, {}
    for name, parent in zip((each.name for each in experiment.method.parents), parents.values(), strict=True):
        given[name], rounds[name] = parent.states(experiment)
    origins = _distances(experiment, given, parents, reporter)
    merge(experiment, given)
    work = {id: experiment.method.personalize(site, None) for id, site in experiment.clients.items()}
    states = experiment.runtime.run(work)
    if scores_in(out) is not None:  # of an earlier merge
        for name in (*reversed(RUN_FILES), CROSS, "report.html"):
            (out / name).unlink(missing_ok=True)
    recipes = {id: origins[id] | experiment.method.recipe(site) for id, site in experiment.clients.items()}
    for id, site in experiment.clients.items():
        model = states[id], site.structure
        write_adapter(
            out / id, experiment.config, experiment.base, id, model, site.data.num_labels, recipes[id], prompt
        )
    if runs:
        known_rounds = {name: round for name, round in rounds.items() if round is not None}
        facts: dict[str, Json] = {"kind": "merge", "rounds": known_rounds}
        _write_run(experiment, out, states, [{**facts, "client": id, **recipes[id]} for id in recipes], known)
    draw_curves(recipes, experiment.metric, out / "curves.png")
    return recipes


def _config(
    method: str, parents: Parents, base: str | None, words: Sequence[str], reporter: Reporter
) -> tuple[Config, Collection[str]]:
    """The configuration of the merge, and which of its settings were given explicitly."""
    kind = methods.merger(method)
    if not (name := base or common_base({option: parent.origin for option, parent in parents.items()})):
        raise UserError("neither adapter names its base; give --base NAME")
    runs = [parent.config for parent in reversed(parents.values()) if parent.config]
    keys = keys_of(words, "the method")
    for key, instead in (("base.name", "--base NAME"), ("method.name", "the method's name as the first word")):
        if key in keys:
            raise UserError(f"{key} cannot be set here; give {instead}")
    if runs and {"task.name", "task.path"} & {*keys}:
        raise UserError("--task and --data only work with two PEFT folders; leave them out, as a run brings its own")
    config = replace(runs[0], method={"name": method}) if runs else alone_config(name, {"name": method})
    config = lay_over(config, words, "the method", also=("method.",))
    config = replace(config, base=replace(config.base, name=name))
    if runs:
        return config, keys
    first = next((parent.origin for parent in parents.values() if parent.origin), None)
    config = replace(config, base=as_trained(config.base, first, keys, reporter.note))
    if "task.name" not in keys:
        for parent in parents.values():
            check_text(parent.place.folder, config.base)
        if not (kind.merger.data_free or config.task.path):
            raise UserError(
                "the mixing weight is computed from examples; give --data FILE, or --task NAME with --client"
            )
    return config, keys


def _one_client(task: TaskConfig, known: Record | None) -> TaskData:
    """The one client of a file of examples, or one without any. `known`: rows of which none is held out that was
    trained on."""
    if task.path is None:
        return TaskData("files", "rouge1", {"merged": ClientData("merged", (), ())})
    client = examples_of(Path(task.path), task)
    (divided,) = ByContent(0, known).hold_out([ClientData(client.client, client.test)], "validation", 0.1)
    return TaskData("files", "rouge1", {client.client: divided})


def _experiment(
    config: Config, keys: Collection[str], parents: Parents, task: TaskData, reporter: Reporter
) -> tuple[Experiment, Prompt | None]:
    """The merge before any parent is read, and the prompts that its folders will name."""
    loaded = kinds.load(config, task, choose_device(config.device))
    loaded, config, said = loaded.as_said(config, lambda: _said(parents, loaded, keys, reporter), keys)
    structure = _common_structure(parents, loaded)
    if any(parent.config for parent in parents.values()):
        experiment = prepare(config, reporter, base=loaded, task=task)
        experiment.clients = experiment.trainers  # the others have no adapter of their own
    else:
        experiment = prepare(replace(config, adapter=structure.as_config()), reporter, base=loaded, task=task)
    return experiment, experiment.base.prompt_of(experiment.config) if said or "task.template" in keys else None


def _distances(
    experiment: Experiment, given: Mapping[str, Mapping[str, State]], parents: Parents, reporter: Reporter
) -> dict[str, dict[str, Json]]:
    """By client its two parents, and how far apart they are; a note where they hardly share an initialisation."""
    fed, local = (str(parent.place) for parent in parents.values())
    distances = {id: round(distance(*(states[id] for states in given.values())), 4) for id in experiment.clients}
    if (apart := max(distances.values())) > UNRELATED:
        reporter.note(
            f"warning: the A matrices of {fed} and {local} are {apart:.2f} apart (0: equal, 1.41: "
            "unrelated), so the two adapters hardly share an initialisation, and their mixture is often worse than "
            "either; train both with the same seed"
        )
    return {id: {"fed": fed, "local": local, "distance": apart} for id, apart in distances.items()}


def distance(fed: State, local: State) -> float:
    """How far apart the A's of two adapters are, relative to their length: 0 equal, sqrt(2) independent draws."""
    names = [name for name in fed if factor_of(name) == FACTORS[0]]
    one, other = fed.pick(names), local.pick(names)
    length = math.hypot(one.norm(), other.norm()) / math.sqrt(2)
    return (one - other).norm() / length if length else 0.0


def _said(parents: Parents, base: Kind, keys: Collection[str], reporter: Reporter) -> Prompt | None:
    """How the parents' prompts are put; of two that differ where that can be, a run's before a folder's. UserError:
    they were trained with different templates, and none is given."""
    # The configuration of a merge is that of the local run, or else of the federated one, which hence comes first.
    order = [option for option in ("--local", "--fed") if parents[option].config]
    order += [option for option in ("--fed", "--local") if not parents[option].config]
    said = {option: prompt for option in order if (prompt := parents[option].prompt(base)) is not None}
    silent = " and ".join(str(parent.place) for option, parent in parents.items() if option not in said)
    if "task.template" not in keys:
        if len({(prompt.template.text, prompt.template.date) for prompt in said.values()}) > 1:
            raise UserError(
                f"--fed was trained with the prompt template {said['--fed'].template.name!r} and --local with "
                f"{said['--local'].template.name!r}; --template NAME says which one the merged adapter is for"
            )
        if silent:
            used = next((prompt.template.name for prompt in said.values()), TaskConfig.template)
            reporter.note(f"{silent} does not name its prompt template, so {used} is used; --template chooses another")
    say_differences(said, {option: parents[option].origin for option in order}, reporter.note, keys)
    return next(iter(said.values()), None)


def _common_structure(parents: Parents, base: Kind) -> Lora:
    """What both parents are, refusing those that do not fit each other. Two that name their layers in different ways
    are alike if these are the same."""
    structures = {option: parent.structure(base) for option, parent in parents.items()}
    fed, local = structures.values()
    if fed.dora or local.dora:
        raise UserError(
            "--fed and --local are DoRA adapters, whose magnitudes no merge can weigh; train with adapter.dora=false, "
            "or use one of the two as it is"
        )
    layers = {option: adapted(base.model, structure) for option, structure in structures.items()}
    alone = min({*layers["--fed"]} ^ {*layers["--local"]}, default="")
    differ = [f"layers ({alone} is one of {'--fed' if alone in layers['--fed'] else '--local'} alone)"] if alone else []
    for what, one, other in (("rank", fed.rank, local.rank), ("scaling", fed.scaling, local.scaling)):
        differ += [] if math.isclose(one, other) else [f"{what} ({one} and {other})"]
    if differ:
        raise UserError(
            f"--fed and --local have different {differ[0]}; llm-fed merge FOLDER FOLDER --method linear (or ties, ...) "
            "merges them without examples"
        )
    return fed


def _write_run(
    experiment: Experiment,
    out: Path,
    states: Mapping[str, State],
    lines: Sequence[Mapping[str, Json]],
    known: Record | None,
) -> None:
    """Score what was merged on the test examples, and write what makes `out` the folder of a finished run. UserError: a
    client has the name of such a file. RunError: the disk is full, or the folder cannot be written. `lines`: of
    metrics.jsonl, before that of the scores. `known`: the rows that the parents know, with their splits."""
    config = experiment.config
    with signs.part("test"):
        tested = [id for id, site in experiment.scored.items() if site.data.queries.get("test")]
        summary = experiment.score(states, "test") if set(tested) <= states.keys() else None
    scores = {"kind": "score", "round": config.rounds, "split": "test"} | (summary.as_json() if summary else {})
    done = {"round": config.rounds, "method": config.method["name"], "scores": scores, "adapters": HERE}
    files = {"config.yaml": config_text(config)}
    logged = [*lines, *([scores] if summary else [])]
    files["metrics.jsonl"] = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in logged)
    for name, value in {SPLITS: known and known.as_json(), "summary.json": done}.items():
        if value:
            files[name] = json.dumps(checksum.added(value), ensure_ascii=False)
    for name in RUN_FILES:
        if (out / name).is_dir():  # of a client of this name
            raise UserError(f"{out / name} is the model of a client, so the merge cannot be opened as a run")
    for name, text in files.items():
        write_result(out / name, text.encode())


def scores_in(out: Path) -> dict[str, Json] | None:
    """The test scores of a merge's output; None where it merged no runs."""
    try:
        done = saved_summary(out) or {}
    except UserError:  # of something else, or damaged
        return None
    return done["scores"] if done.get("adapters") == HERE else None
