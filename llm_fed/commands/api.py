"""Runs and comparisons from Python: `llm_fed.run`, `llm_fed.compare`, and `llm_fed.open_run` for what is finished.

They do the same as the commands, in the same run folders, so a command can continue what a call began and vice versa.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fed.basics import documents
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import write_result
from llm_fed.commands.own import NO_OBJECTS, OwnObjects
from llm_fed.settings import configfile, habits, plugins
from llm_fed.settings.config import Config
from llm_fed.settings.objects import find, given, is_object
from llm_fed.settings.plugins import short

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from llm_fed.commands.compare import Jobs
    from llm_fed.eval.tables import Table
    from llm_fed.eval.variance import Drawn
    from llm_fed.eval.verdict import Verdict
    from llm_fed.export.load import ImageModel
    from llm_fed.export.personal import Personal
    from llm_fed.kinds import Kind
    from llm_fed.runs.frames import Frames

Given = str | Path | Mapping[str, Json]  # a YAML file, or its content as nested dictionaries


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A finished run: its scores, its adapters, and the personal models ready to use. Scores are 0-100.

    Attributes:
        folder: the run folder, with report.html.
        round: the round (of `rounds`) whose models were tested and exported.
        metric: the metric of the scores; None if no client has test examples.
        scores: the test score of each client that has test examples.
        mean, worst_half: the mean of these scores, and of the worst half of them.
        base: the test score of the base without an adapter, by client; empty where it was not scored.
        rule: the test score of the best rule that trains nothing, by client; empty where it was not scored.
        rules: which rule that is, by client, such as "most frequent answer".
        adapters: the folder of each client's personal model.
        warnings: what is wrong, as far as an interval shows it: dictionaries with `kind`, `clients`, `text` and
            `figures` (by client).
        allow: code from outside llm_fed that the folder may name, see `open_run`.
        own: objects that the run was given instead of names.
    """

    folder: Path
    method: str
    round: int
    rounds: int
    metric: str | None
    scores: dict[str, float]
    mean: float | None
    worst_half: float | None
    base: dict[str, float]
    rule: dict[str, float]
    rules: dict[str, str]
    adapters: dict[str, Path]
    warnings: list[dict[str, Json]] = field(default_factory=list)
    allow: tuple[str, ...] = ()
    own: OwnObjects | None = None

    def __repr__(self) -> str:
        scores = f"{self.metric} {self.mean:.1f}, worst half {self.worst_half:.1f}" if self.scores else "no scores"
        return f"Result({self.method}, {scores}, {len(self.scores)} clients, {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the scores beside those of base and rule."""
        from pandas import DataFrame

        columns = {"base": self.base, "rule": self.rule, self.method: self.scores}
        table = DataFrame({name: scores for name, scores in columns.items() if scores}).rename_axis("client")
        return f"<p>{escape(repr(self))}</p>{table.to_html(float_format='{:.1f}'.format)}"

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: rounds, clients, scores, ...; each has a `kind`."""
        from llm_fed.runs.records import read_records

        return read_records(self.folder / "metrics.jsonl")

    @cached_property
    def frames(self) -> Frames:
        """The results as data frames: `scores` by client and round, `rounds`, `clients`, `weights` and `samples`."""
        from llm_fed.runs.frames import Frames

        return Frames(self.folder)

    def model(self, client: str) -> Personal | ImageModel | nn.Module:
        """A client's personal model: a language model has `generate` and `reply`, an image model classifies pictures,
        and of a module that was given as base= it is a copy with the client's weights. UserError: the run has exported
        no model of this client."""
        from llm_fed.export.load import load_client, load_image_model, load_own
        from llm_fed.kinds import Kind
        from llm_fed.runs.reading import exported

        with plugins.allowing(self.allow):
            folder = exported(self.folder, [client])[client]
        if is_object(name := self._config.base.name):
            with self._at_hand():
                base = find("base.name", name)
            if not isinstance(base, tuple | Kind):
                return load_own(folder, base, name)
        if self._config.adapter is None:
            return load_image_model(folder)
        return load_client(folder, self._loaded)

    def chat(
        self, client: str, text: str, *, system: str = "", temperature: float | None = None, top_p: float = 1.0
    ) -> str:
        """The client's answer to one prompt, in the prompt template of training.

        Args:
            system: a system prompt before it.
            temperature: of sampling, in which tokens are drawn (default: the answer is greedy, as in scores).
            top_p: of sampling: the share of the probability of the likeliest tokens among which one is drawn.

        Raises:
            UserError: see `model`; or it is an image model, or a number of sampling is out of its range.
        """
        from llm_fed.engine.continuous import Sampling
        from llm_fed.export.personal import Personal

        model = self.model(client)
        if not isinstance(model, Personal):
            raise UserError(f"{self.folder} holds image models, which cannot chat; use model(client)")
        said = [{"role": "system", "content": system}] if system else []
        drawn = None if temperature is None else Sampling(temperature, top_p)
        return "".join(model.reply([*said, {"role": "user", "content": text}] if said else text, sampling=drawn))

    @cached_property
    def _config(self) -> Config:
        from llm_fed.runs.reading import read_config

        with plugins.allowing(self.allow):
            return read_config(self.folder)

    @cached_property
    def _loaded(self) -> Kind:
        """The base, loaded once for all clients."""
        from llm_fed import kinds, tasks
        from llm_fed.experiment.run import quiet
        from llm_fed.runtime.launch import choose_device

        quiet()
        config = self._config
        with self._at_hand(), plugins.allowing(self.allow):
            seeds = config.federation_seed, config.evaluation_seed
            return kinds.load_alone(config, lambda: tasks.load(config.task, *seeds), choose_device(config.device))

    def _at_hand(self) -> AbstractContextManager[None]:
        """Within it, the run's base is found, also under the name that another object of the same kind had."""
        objects = dict(self.own.given) if self.own else {}
        for base in [thing for (key, _), thing in objects.items() if key == "base.name"]:
            objects["base.name", self._config.base.name] = base
        return given(objects)


def run(
    config: Given | None = None,
    *words: str,
    out: str | Path | None = None,
    fresh: bool = False,
    start: str | Path | None = None,
    base: Any = None,
    data: Any = None,
    method: Any = None,
    metric: Any = None,
    callbacks: Sequence[Any] = (),
    **others: Any,
) -> Result:
    """Train a federation, or continue it, until it is finished.

    Args:
        config: a YAML file, or its content as nested dictionaries; None: all defaults. For your own texts a dictionary
            that does not say method, rates or template gets those that `llm-fed init` proposes.
        words: settings such as "local.lr=1e-4" that override the configuration.
        out: the run folder (default: where the command would put it, runs/NAME-METHOD-seedN). A finished run in it is
            only read, an interrupted one is continued.
        fresh: delete an earlier run in the folder first.
        start: a finished run, or a folder of adapters, to start from.
        base: instead of `base.name`, a model and its tokenizer as a pair, a torch.nn.Module that classifies
            pictures, or a `Kind`. It is used as it is, and frozen where adapters are trained.
        data: instead of `task`, {client: rows}, where rows are a data frame, a data set of the library datasets, a
            list, or a dict of such by split; or one of these with a column that names the client.
        method: instead of `method`, a Method, its class, a merger, or a name.
        metric: instead of `eval.metric`, a function that is called with `predictions=` and `references=` (lists)
            and returns 0 to 100 for all or for each, an object of the library evaluate, or a name.
        callbacks: objects with some of the methods on_step, on_round, on_scores and on_end (docs/python.md).
        others: settings are no keyword arguments, so these are refused; what to write is said.

    Raises:
        UserError: a mistake in the arguments, found before anything is trained.
        RunError: the run failed; the same call continues from its last checkpoint.
        Exception: what a callback or a metric has raised; the same call continues from the last checkpoint.
    """
    from llm_fed.runs.tracking import Callbacks

    if others:
        _refuse(others, "run")
    config, hooks = {} if config is None else config, Callbacks.of(callbacks)
    own = OwnObjects.of(base=base, data=data, method=method, metric=metric)
    with given(own.given):
        if isinstance(config, Mapping):
            from llm_fed.commands import init

            config = init.completed(config, [*own.words, *words], base, data)
        resolved = resolve(config, words, out, start, own)
        folder = default_folder(config, resolved) if out is None else Path(out)
        from llm_fed.experiment import run as experiment  # takes seconds, so mistakes are named first
        from llm_fed.runs.tracking import Reporter

        experiment.quiet()
        reporter = Reporter(callbacks=hooks)
        if own.given:
            reporter.note(own.note)
        experiment.train(resolved, folder, fresh=fresh, reporter=reporter)
        allowed = list(plugins.named_in(configfile.as_dict(resolved)).values())
        result = replace(open_run(folder, allow=allowed), own=own)
        hooks.round_ended()  # scores of the test
        hooks.tell("on_end", result)
    return result


def _refuse(others: Mapping[str, Any], function: str) -> None:
    """UserError for the first keyword argument that a function does not have, with what to write in its place."""
    known = configfile.flat(configfile.as_dict(Config()))
    for key, value in others.items():
        word = f"{key}={value}" if key in known else habits.instead(key, value, known)
        advice = f'; write the setting as a text behind the configuration, "{word}"' if word else ""
        raise UserError(f"llm_fed.{function} has no argument {key}={advice}")


def resolve(
    config: Given,
    words: Sequence[str],
    out: str | Path | None,
    start: str | Path | None = None,
    own: OwnObjects = NO_OBJECTS,
) -> Config:
    """The configuration of a run in `out`, checked as far as possible without loading its data and base. UserError: the
    first mistake. `own`: objects instead of names, which must be at hand."""
    from llm_fed.commands import section

    for word in words if own.settings is not None else ():
        if word.partition("=")[0].partition(".")[0] == "method":
            raise UserError(f"{word} stands beside method=, which is an object with its own settings; leave it out")
    resolved = own.laid_over(configfile.load(config, [*own.words, *words]))
    if start is not None:
        if resolved.adapter is None:
            raise UserError(
                f"--from {start} starts from adapters, but adapter is null, which trains whole models; set adapter.rank"
            )
        resolved = replace(resolved, adapter=replace(resolved.adapter, start=str(Path(start).resolve())))
    folder = default_folder(config, resolved) if out is None else Path(out)
    section.check(resolved, data=not (folder / "config.yaml").exists())  # what is complete needs its data no more
    return resolved


def default_folder(config: Given, resolved: Config) -> Path:
    """The default run folder of a configuration file."""
    name = "run" if isinstance(config, Mapping) else Path(config).stem
    return Path("runs") / f"{name}-{short(str(resolved.method['name']))}-{resolved.seed_name}"


def open_run(folder: str | Path, *, allow: Sequence[str] = (), base: Any = None) -> Result:
    """Open a finished run by its folder. UserError: it holds no finished run, or it names code that is not allowed.

    Args:
        base: what the run was given as base=, where that was an object; models are then used on it.
        allow: methods and tasks from outside llm_fed, as "module:Name", that the folder may name: their code is run
            where a model is loaded. Those that an installed package publishes as entry points need not be allowed.
    """
    from llm_fed.runs.reading import adapter_folders, finished, read_config

    with plugins.allowing(allow):
        summary, adapters = finished(Path(folder)), adapter_folders(Path(folder))
        rounds = summary.get("rounds") or read_config(Path(folder)).rounds
    scores = summary["scores"]
    return Result(
        folder=Path(folder),
        method=summary["method"],
        round=summary["round"],
        rounds=rounds,
        metric=scores.get("metric"),
        scores=dict(scores.get("clients", {})),
        mean=scores.get("mean"),
        worst_half=scores.get("worst_half"),
        base=dict(summary.get("base", {}).get("clients", {})),
        rule=dict(summary.get("rule", {}).get("clients", {})),
        rules=dict(summary.get("rule", {}).get("rules", {})),
        adapters=adapters,
        warnings=list(summary.get("warnings", ())),
        allow=tuple(allow),
        own=None if base is None else OwnObjects.of(base=base),
    )


def compare(
    config: Given,
    *words: str,
    out: str | Path,
    methods: Mapping[str, Any] | Sequence[Any] = (),
    seeds: Sequence[int] = (),
    draws: int = 0,
    jobs: Jobs = 1,
    base: Any = None,
    data: Any = None,
    metric: Any = None,
    **others: Any,
) -> Table:
    """Train several methods with several seeds, or continue to, and return one table with a verdict.

    Args:
        config: a YAML file, or its content as nested dictionaries, which is then saved as `out`/comparison.yaml. Its
            `compare` section may list rows and seeds.
        words: settings that override those of every row.
        out: the folder for the runs and the tables.
        methods: the rows or methods to compare (default: all rows of the file); also Method objects, classes or
            mergers, or a dictionary of any of these by label.
        seeds: the seeds (default: those of the file).
        draws: the number of federations to draw, each with its own training seed, instead of `seeds`.
        jobs: how many runs are trained at a time; from two on each in a process of its own, without objects;
            `"ray"`: on the machines of a Ray cluster.
        base: of all rows, as `data` and `metric`; all three as in `run`.
        others: as in `run`.

    Returns:
        The table; read `verdict.sentences` and `by_client`, or use `as_json()` or `as_markdown()`.

    Raises:
        UserError: a mistake in the arguments, found before anything is trained.
        RunError: a run failed, and which; the table of the other runs is in `out`.
    """
    from llm_fed.commands import section

    if others:
        _refuse(others, "compare")
    folder, own = Path(out), OwnObjects.of_rows(methods, base=base, data=data, metric=metric)
    path = folder / "comparison.yaml" if isinstance(config, Mapping) else Path(config)
    if isinstance(config, Mapping):
        from llm_fed.commands import init

        tree = documents.plain(init.completed(config, [*own.words, *words, "method="], base, data))
        write_result(path, documents.dump(tree).encode())
    with given(own.given):
        rows = section.read_rows(path, words, own.labels, seeds, draws, own)
        rows.check()
        from llm_fed.commands import compare as comparison  # takes seconds, so mistakes are named first
        from llm_fed.experiment.run import quiet

        quiet()
        table = comparison.compare(rows, folder, jobs=jobs)
    if table.failed:
        raise RunError(f"{table.failed} failed, see {folder / 'table.md'}; repeat the call to retry")
    return table


def verdict(
    frame: pd.DataFrame,
    *,
    drawn: Drawn,
    test_share: float | Mapping[str, float] | None = None,
    these_clients: bool = False,
) -> Verdict:
    """Which differences of a table of scores are shown, whoever made the table: what `compare` says of its own. The
    verdict's `claims` is a frame with a line per pair: first, second, difference, low, high and shown; its `str()` is
    the text. UserError: something is wrong with the table, or with a share.

    Args:
        frame: the columns row (a method, say), draw, client and score, in points of 100. A score that is not defined
            is missing. Runs of one draw must have seen the same clients and rows.
        drawn: what a draw draws anew: `federations`, with their clients; `splits` of the same clients' rows; `fixed`:
            the training alone, as each client's test rows stay; `trainings` of one federation.
        test_share: which part of its rows each client tests, or one number for all. Of `splits` it is needed with fewer
            than four clients, or with `these_clients`.
        these_clients: whether claims shall be about these clients alone, and not about others of the kind.
    """
    from llm_fed.eval.verdict import Verdict

    return Verdict.of_frame(frame, drawn, test_share, these_clients)
