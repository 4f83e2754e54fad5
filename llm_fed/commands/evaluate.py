"""Evaluation and export after training: of a finished run's personal adapters, or of one PEFT adapter on a task or a
file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed import kinds, tasks
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, require
from llm_fed.basics.files import write_folders
from llm_fed.bench.build import Experiment, prepare
from llm_fed.experiment import splits
from llm_fed.experiment.baselines import best_rules, rule_line, shared_by
from llm_fed.export import gguf_files, peft_folders
from llm_fed.export.copies import handed_out, public_content
from llm_fed.export.merged import skeleton
from llm_fed.export.models import read as read_personal
from llm_fed.export.origins import as_trained, check_text, read_origin
from llm_fed.export.personal import alone
from llm_fed.models.base import Base
from llm_fed.models.labels import read_labels
from llm_fed.models.prompt import FILE as PROMPT
from llm_fed.models.prompt import Prompt, prompt_for
from llm_fed.rows.formats import parts_of
from llm_fed.runs.reading import adapter_folders, exported, finished, read_config
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device
from llm_fed.scoring.scores import Summary
from llm_fed.settings import paths
from llm_fed.settings.config import Config, TaskConfig, check
from llm_fed.settings.configfile import from_dict, keys_of, overlay
from llm_fed.state import State
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.files import read_file

SPLITS = ("test", "validation")
# Beginnings of the keys that say what is scored, and how; of those that decide which examples are held out; and of
# those that say how an example becomes tokens.
_SCORING = (
    "task.", "eval.metric", "eval.limit", "eval.batch_size", "eval.max_new_tokens", "base.name", "base.dtype",
    "eval.base", "eval.cross", "base.quantization", "base.device_map", "base.revision", "device",
)  # fmt: skip
_DIVIDES = ("task.validation", "task.partition.", "task.server.")
_SELECTS = ("task.groups", "task.clients", "task.sample_clients", "task.name")  # other rows than those of the run
_OF_TEXT = ("task.template", "task.max_length", "task.too_long", "task.loss_on")


def evaluate_run(folder: Path, *, split: str = "test", settings: Sequence[str] = ()) -> dict[str, Any]:
    """The `scores` of a finished run's personal adapters, each on its own client's `split`; with those of the base
    (`base`) and of the best rule that trains nothing (`rule`), where these are known, and the run's `warnings`.
    UserError: the folder is no finished run, or the split has no example. `settings`: `key=value` words laid over the
    run's configuration, see `lay_over`; `eval.base=false` leaves out the base."""
    reporter = Reporter()
    config = scoring_config(folder, split, settings, reporter)
    experiment, states = reopen(folder, config, settings, reporter)
    rule = rule_line(experiment, best_rules(experiment, split), split)
    known = {kind: line for kind, line in {"base": _base(folder, experiment, split), "rule": rule}.items() if line}
    warnings = finished(folder).get("warnings", [])  # of the run's own test
    scores = _score(experiment, states, split).as_json()
    return {"method": config.method["name"], "scores": scores, **known, "warnings": warnings}


def _base(folder: Path, experiment: Experiment, split: str) -> dict[str, Any] | None:
    """The base's scores: those of the run where it was scored alike, else new ones if they are requested."""
    known = finished(folder).get("base")
    own = shared_by(experiment.config, experiment.metric)
    if known and split == "test" and shared_by(read_config(folder), known["metric"]) == own:
        return dict(known)
    summary = experiment.score_base(split) if experiment.scores_base else None
    return summary.as_json() if summary else None


def scoring_config(folder: Path, split: str, settings: Sequence[str], reporter: Reporter) -> Config:
    """A run's configuration as its adapters are scored under it; the arguments are those of `evaluate_run`. UserError:
    a word is wrong, or there is no such split."""
    require("--split", split, SPLITS)
    config = lay_over(read_config(folder), settings, "the run folder")
    if divided := [key for key in keys_of(settings, "the run folder") if key.startswith(_DIVIDES)]:
        reporter.note(
            f"{' and '.join(divided)} divides only rows that the run does not know; the others stay in their splits"
        )
    return config


def reopen(
    folder: Path, config: Config, settings: Sequence[str] = (), reporter: Reporter | None = None
) -> tuple[Experiment, dict[str, State]]:
    """A finished run's experiment under `config`, and what it exported of each who has examples to be scored on.
    UserError: the folder is no finished run, or the configuration does not fit it. `settings`: that were laid over the
    run's. `reporter`: is told what has changed in the data."""
    reporter = reporter or Reporter()
    exported(folder, list(finished(folder)["scores"].get("clients", ())))
    check(config)
    rows = splits.known(folder, config)
    if config.adapter:  # what is scored was exported whole, wherever it started
        config = replace(config, adapter=replace(config.adapter, start=None))
    experiment = prepare(config, Reporter(), known=rows.all)
    if not any(key.startswith(_SELECTS) for key in keys_of(settings, "the run folder")):
        for note in splits.notes(experiment, rows, trains=False):
            reporter.note(note)
    _leave_out(experiment, folder, reporter)
    requested = [id for id, site in experiment.scored.items() if any(site.data.queries.values())]
    folders = exported(folder, requested)
    states = {id: read_personal(folders[id], experiment.scored[id].structure, experiment.base) for id in requested}
    return experiment, states


def _leave_out(experiment: Experiment, folder: Path, reporter: Reporter) -> None:
    """Score no client that came after the run, and say so. UserError: no other client is left."""
    known = {*adapter_folders(folder), experiment.server.id}
    if not (later := [id for id in experiment.scored if id not in known]):
        return
    experiment.clients = {id: site for id, site in experiment.clients.items() if id in known}
    names = ", ".join(later[:3]) + (f" and {len(later) - 3} more" if len(later) > 3 else "")
    if not experiment.clients:
        raise UserError(f"{folder} has no adapter of any client of these data ({names}); give the data of the run")
    reporter.note(f"{names} came after the run and has no adapter there, so it is left out; llm-fed join makes one")


def lay_over(config: Config, words: Sequence[str], where: str, also: tuple[str, ...] = ()) -> Config:
    """A configuration with `key=value` words laid over it that say what is scored, and how. UserError: a word is wrong,
    or its key has no meaning where nothing is trained. `where`: what the words stand after, for messages. `also`:
    beginnings of further keys that have a meaning here."""
    found = overlay(config, words, where)
    for key in keys_of(words, where):
        if not key.startswith((*_SCORING, *also)):
            known = ", ".join(f"{name}*" if name.endswith(".") else name for name in (*_SCORING, *also))
            raise UserError(f"{key} only affects training, and nothing is trained here; set {known}")
    return found


def alone_config(base: str, method: Mapping[str, Json]) -> Config:
    """The configuration of what is scored or merged without a run, before any word is laid over it."""
    return from_dict({"base": {"name": base, "dtype": "float32"}, "task": {"name": "files"}, "method": dict(method)})


def evaluate_adapter(
    base_name: str,
    adapter: Path | None,
    settings: Sequence[str],
    *,
    split: str = "test",
    reporter: Reporter | None = None,
) -> Summary:
    """One PEFT adapter, or a language model without any, on every client of a task, or on the examples of one file.

    The base is loaded as it was when the adapter was trained, but for what `settings` say of it. UserError: the adapter
    is not one of this base, or there is nothing to score. `settings`: `key=value` words that say what is scored, see
    `lay_over`: `task.path=FILE` or `task.name=NAME`. Without a template there or in the adapter's folder alpaca-short
    is used, with a note.
    """
    require("--split", split, SPLITS)
    reporter, keys = reporter or Reporter(), keys_of(settings, "--base")
    origin = adapter or Path(os.path.expanduser(base_name))  # or a base with an adapter folded in
    config = lay_over(alone_config(base_name, {"name": "local"}), settings, "--base")
    config = replace(config, base=as_trained(config.base, read_origin(origin), keys, reporter.note))
    named = "task.name" in keys
    if not (named or config.task.path):
        raise UserError("--base needs examples to score; give --task NAME or --data FILE")
    if adapter and not named:
        check_text(adapter, config.base)
    labels = read_labels(adapter) if adapter and config.task.name == "classification" else None
    if labels and config.task.labels is None:
        config = replace(config, task=replace(config.task, labels=labels))
    known = splits.recall_around(adapter) if adapter else None
    if named:
        loaded = tasks.load(config.task, config.federation_seed, config.evaluation_seed, known)
    else:
        loaded = _one_file(config, keys)
        if known and (trained := known.trained(*(client.test for client in loaded.clients.values()))):
            reporter.note(f"{trained} of the examples that are scored were trained on by this adapter's run")
    if adapter is None and not kinds.of(config.base, loaded.base_kind).knows:
        raise UserError(
            f"task.name={config.task.name}: a classifier's head is trained with its adapter, so there is nothing to "
            "score without one; give --adapter DIR"
        )
    base = kinds.load(config, loaded, choose_device(config.device))
    if adapter:
        state, structure = peft_folders.read(adapter, base)
        peft_folders.check_head(adapter, structure, base)
    else:
        nothing = alone(base)
        state, structure = nothing.state, nothing.structure

    def said() -> Prompt | None:
        if (found := prompt_for(base, origin)) is None and "task.template" not in keys:
            reporter.note(
                f"{adapter or base_name} does not name its prompt template, so {config.task.template} is used; "
                "--template chooses another"
            )
        return found

    base, config, _ = base.as_said(config, said, keys)
    experiment = prepare(replace(config, adapter=structure.as_config()), Reporter(), base=base, task=loaded)
    return _score(experiment, dict.fromkeys(experiment.clients, state), split if named else "test")


def _one_file(config: Config, keys: Sequence[str]) -> TaskData:
    """The examples of the file `task.path` as those of one client."""
    for key in keys:
        if key.startswith("task.") and not key.startswith(("task.path", "task.columns.", "task.bad_rows", *_OF_TEXT)):
            raise UserError(f"{key} does not apply to a single file of examples; give --task NAME")
    client = examples_of(Path(os.path.expanduser(config.task.path or "")), config.task)
    return TaskData("files", "rouge1", {client.client: client})


def export(folder: Path, out: Path, clients: Sequence[str] = (), gguf: bool = False) -> list[Path]:
    """Copy the personal adapters of a finished run to `out/<client>`, all clients or only those named. UserError: the
    folder is no finished run, it has no such client, or `out/<client>` holds other files; or llama.cpp cannot have such
    an adapter. RunError: the disk is full, or `out` cannot be written. `gguf`: whether each folder has the adapter as a
    LoRA of llama.cpp, too."""
    found = handed_out(folder, clients)
    more: dict[str, dict[str, bytes]] = _as_gguf(folder, found) if gguf else {client: {} for client in found}
    copies = ((out / client, {**_contents(adapter), **more[client]}) for client, adapter in found.items())
    write_folders(copies, "an adapter")
    return [out / client for client in found]


def _as_gguf(folder: Path, adapters: Mapping[str, Path]) -> dict[str, dict[str, bytes]]:
    """By client the adapter as a file of llama.cpp."""
    config = read_config(folder).base
    for adapter in adapters.values():
        if not (adapter / PROMPT).is_file():
            raise UserError(f"{adapter} is not an adapter of a language model; leave out --gguf")
    base = Base(model=skeleton(config), name=config.name)
    return {
        client: {gguf_files.ADAPTER: gguf_files.adapter(adapter, replace(base, origin=read_origin(adapter)))}
        for client, adapter in adapters.items()
    }


def _contents(adapter: Path) -> dict[str, bytes]:
    """The files of an adapter, without what they say of this machine."""
    files = sorted(path for path in adapter.rglob("*") if path.is_file())
    contents = ((path, public_content(path) if path.suffix == ".json" else None) for path in files)
    return {str(path.relative_to(adapter)): path.read_bytes() if own is None else own for path, own in contents}


def examples_of(path: Path, task: TaskConfig) -> ClientData:
    """A client, named after the file, with its examples as test split."""
    path = paths.local("--data", str(path))
    return ClientData(parts_of(path.name)[0], (), (), read_file(path, task))


def _score(experiment: Experiment, states: Mapping[str, State], split: str) -> Summary:
    if (summary := experiment.score(states, split)) is None:
        raise UserError(
            f"no client has a {split} example to be scored on; with task.validation above 0 a validation split is held "
            "out of the training examples"
        )
    return summary
