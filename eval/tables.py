"""The table of a comparison: methods by clients, mean ± std over seeds, and what each costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from html import escape
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

from matplotlib.ticker import EngFormatter
from rich import filesize
from rich.table import Table as RichTable
from rich.text import Text

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import listed
from llm_fed.basics.terminal import table_of_numbers
from llm_fed.bench.costs import ClientWork, Parameters, Traffic
from llm_fed.eval.verdict import Scored, Verdict
from llm_fed.eval.warning import Warned
from llm_fed.scoring.scores import NOT_SCORED, not_defined, reads_texts, with_range

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_CLIENTS = 16  # more clients than this have no columns of their own in text; CSV and JSON have all
MAX_TERMINAL_ROWS = 6  # of more rows the terminal shows averages alone
CONTROL = "pooled"  # all rows in one place: it shows what sharing could reach, and is no method of federation
BASELINES = ("base", "rule")
TENTH = 0.1  # by which the work of rows may differ before it is said
Cost = TypeVar("Cost", Traffic, ClientWork)
# Of a run, what table.json has unless it is empty.
_ONLY_IF_ANY = ("unscored", "undefined", "only_tested", "uncounted", "warnings", "beside")


@dataclass(frozen=True)
class RunResult:
    """One finished run."""

    folder: str
    round: int  # the round that was tested
    clients: Mapping[str, float]  # test scores, 0-100, those of `uncounted` too; empty where none has test examples
    average: float | None  # over the clients
    worst_half: float | None  # mean of the ceil(n / 2) lowest clients
    traffic: Traffic
    base: Mapping[str, Any] | None = None  # the score line of the base without any adapter, where it was scored
    rule: Mapping[str, Any] | None = None  # the line of each client's best rule that trains nothing, where it is known
    shared: str = ""  # equal for runs whose base and rules have the same scores
    federation: int | None = None  # its seed; None: that of the cell
    training: int | None = None
    warnings: Sequence[Warned] = ()  # what is wrong with the run, see `eval/warning.py`
    events: Mapping[str, int] = field(default_factory=dict)  # what went wrong how often, e.g. {"refused upload": 3}
    unscored: Sequence[str] = ()  # clients without a score
    undefined: Sequence[str] = ()  # of these the ones that have test examples, for which the metric is not defined
    only_tested: Sequence[str] = ()  # clients without training examples, of a method that scores them all the same
    uncounted: Sequence[str] = ()  # clients whose score is in no mean, as another row has none of theirs
    beside: Mapping[str, float] = field(default_factory=dict)  # means of what was measured beside, by name
    work: ClientWork | None = None  # what training took; None of runs of earlier versions
    tested: str | None = None  # `Scored.tested` and `Scored.shares`
    shares: Mapping[str, float] = field(default_factory=dict)
    validation: float | None = None  # mean validation score of the tested models, which no test example has chosen


@dataclass(frozen=True)
class MeanAndStd:
    """A score over seeds: its mean, and the standard deviation of the sample (divided by n - 1; one seed: None)."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanAndStd | None:
        """Of those that are known; None where none is."""
        known = [value for value in values if value is not None]
        return cls(fmean(known), stdev(known) if len(known) > 1 else None) if known else None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


@dataclass
class ComparisonRow:
    """One row: what it is, and by seed what is known of its runs so far."""

    label: str
    words: list[str]  # what is laid over the configuration file
    method: str
    parameters: Parameters
    results: dict[int, RunResult] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def over_seeds(self, score: Callable[[RunResult], float | None]) -> MeanAndStd | None:
        """A score that is taken per seed and then over the seeds."""
        return MeanAndStd.of(score(result) for result in self.results.values())

    def client(self, id: str) -> MeanAndStd | None:
        return self.over_seeds(lambda result: result.clients.get(id))

    def beside(self, name: str) -> MeanAndStd | None:
        """The summary of what was measured beside the score."""
        return self.over_seeds(lambda result: result.beside.get(name))

    @property
    def traffic(self) -> Traffic | None:
        return _mean_of(Traffic, [result.traffic for result in self.results.values()])

    @property
    def work(self) -> ClientWork | None:
        return _mean_of(ClientWork, [result.work for result in self.results.values()])


Cell = tuple[str, bool]  # its text, and whether it is marked as one of the best of its column
Value = MeanAndStd | float | tuple[float, ...] | None


def few(number: float, adapter: int = 1, short: bool = False) -> str:
    """A mean over clients, `80` or `13.3`."""
    return f"{number:,.1f}".removesuffix(".0")


def size(number: float, adapter: int, short: bool) -> str:
    return filesize.decimal(round(number), precision=1 if short else 2)


def times(counts: tuple[float, ...], adapter: int, short: bool) -> str:
    """Numbers of parameters and how many adapters that is, `6.42 M (2×)`; if `short` only these; equal ones once."""
    found = []
    for count in dict.fromkeys(counts):
        multiple = f"{count / adapter:.3g}×"
        plain = f"{count:g}" if count < 1000 else _SHORT(count)
        found.append(multiple if short else f"{plain} ({multiple})" if count else "0")
    return ", ".join(found)


@dataclass(frozen=True)
class Column:
    """A column of the table; it stands wherever it has a title."""

    title: str  # in table.md, and of a cost in the second table of the page
    value: Callable[[ComparisonRow], Value]  # of a row: a score over the seeds, or a cost
    text: Callable[..., str] | None = None  # of a cost, given the parameters of an adapter, and whether room is short
    key: str = ""  # of a score in table.json and table.csv, which have each field of the costs
    terminal: str = ""  # its title there, if it is shown; rich crops what goes beyond 80 characters without a word
    page: str = ""  # its title in the first table of table.html
    judged: bool = False  # whether the verdict marks its best rows
    held: bool = False  # whether it gives way in a terminal to scores that were measured beside

    def write(self, row: ComparisonRow, adapter: int, short: bool = False) -> str:
        """The cell of a row: nothing where there may be a value later, and a dash where there is none."""
        value, done = self.value(row), bool(row.results)
        if isinstance(value, MeanAndStd):
            return f"{value.mean:.2f}" if short else str(value)
        if not row.method and not done:
            return "-"
        if self.text is None:
            return "-" if done else ""
        return "" if value is None else self.text(value, adapter, short)


SUMMARIES = (
    Column(
        "average", lambda row: row.over_seeds(lambda run: run.average), key="average", terminal="average", page="mean",
        judged=True,
    ),
    Column(
        "worst half", lambda row: row.over_seeds(lambda run: run.worst_half), key="worst_half", terminal="worst\nhalf",
        page="worst half",
    ),
)  # fmt: skip
COSTS = (
    Column("steps", lambda row: row.work.steps if row.work else None, few, terminal="steps"),
    Column("tokens", lambda row: row.work.tokens if row.work else None, few),
    Column("seconds", lambda row: row.work.seconds if row.work else None, few),
    Column("up per round", lambda row: row.traffic.up_per_round if row.traffic else None, size),
    Column(
        "up in total", lambda row: row.traffic.up if row.traffic else None, size, terminal="bytes\nsent",
        page="a client sends",
    ),
    Column("down per round", lambda row: row.traffic.down_per_round if row.traffic else None, size),
    Column("down in total", lambda row: row.traffic.down if row.traffic else None, size, page="and receives"),
    Column("params on server", lambda row: (row.parameters.server,), times, terminal="held by\nserver", held=True),
    Column(
        "params sent", lambda row: (row.parameters.down, row.parameters.up), times, terminal="in a\nmessage", held=True
    ),
    Column("params on client", lambda row: (row.parameters.client,), times, terminal="held by\na client"),
)  # fmt: skip


@dataclass(frozen=True)
class TableFrames:
    """A comparison as data frames of pandas: `scores` has a row per label, seed and client, `runs` one per run."""

    scores: DataFrame
    runs: DataFrame


@dataclass(repr=False)
class Table:
    """All rows of a comparison. Rows without any finished run have empty cells."""

    metric: str
    seeds: Sequence[int]
    adapter: int  # parameters of one adapter as the configuration file describes it
    rows: list[ComparisonRow]
    notes: list[str] = field(default_factory=list)
    natural: bool = False  # whether the clients come with the data, and are not drawn with a seed
    pictures: list[Path] = field(default_factory=list)  # as far as they are drawn

    @property
    def baselines(self) -> dict[str, list[ComparisonRow]]:
        """The rows `base` (the model without training) and `rule` (the best rule that trains nothing), each once, or
        where rows differ in base or data once for those that share it. Empty where nothing is known; pictures need no
        empty row."""
        by_kind = {kind: list(_baselines(self.rows, kind)) for kind in BASELINES}
        if reads_texts(self.metric):
            return {kind: rows or [ComparisonRow(kind, [], "", Parameters())] for kind, rows in by_kind.items()}
        return {kind: rows for kind, rows in by_kind.items() if rows}

    @property
    def shown(self) -> list[ComparisonRow]:
        return [*chain(*self.baselines.values()), *self.rows]

    @property
    def clients(self) -> list[str]:
        return self._of_all(lambda result: result.clients)

    @property
    def beside(self) -> list[str]:
        """The names of what was measured beside the score, such as the margin of preferences."""
        return self._of_all(lambda result: result.beside)

    @property
    def unscored(self) -> list[str]:
        """The clients without a score in any row, as they have no test example, or none that the metric is for."""
        return [id for id in self._of_all(lambda result: result.unscored) if id not in self.clients]

    @property
    def uncounted(self) -> list[str]:
        """The clients that some rows score, and that count in no mean, as others cannot score them."""
        return self._of_all(lambda result: result.uncounted)

    def _of_all(self, names: Callable[[RunResult], Iterable[str]]) -> list[str]:
        results = [result for row in self.rows for result in row.results.values()]
        return list(dict.fromkeys(chain.from_iterable(map(names, results))))

    def uncounted_at(self, seed: int) -> set[str]:
        """The clients of this seed that some finished rows score and others do not: without training examples, or where
        the metric is not defined."""
        results = [row.results[seed] for row in self.rows if seed in row.results]
        known = {id for result in results for id in (*result.only_tested, *result.undefined)}
        return {id for id in known if any(id not in result.clients for result in results)}

    @property
    def by_client(self) -> dict[str, dict[str, list[float]]]:
        """By label and client the score of each finished seed, of the rows that have all clients in all of these."""
        clients = [id for id in self.clients if id not in self.uncounted]
        return {
            row.label: {id: [result.clients[id] for result in row.results.values()] for id in clients}
            for row in self.rows
            if row.results and all(id in result.clients for result in row.results.values() for id in clients)
        }

    @property
    def verdict(self) -> Verdict:
        rules = _known(self.rows, "rule")

        def tested(seed: int, result: RunResult) -> Scored:
            federation = seed if result.federation is None else result.federation
            training = seed if result.training is None else result.training
            rule = rules[result.shared]["clients"] if result.shared in rules else {}
            scores, ruled = (
                {id: score for id, score in of.items() if id not in result.uncounted} for of in (result.clients, rule)
            )
            return Scored(federation, training, scores, ruled, result.tested, result.shares)

        rows = {row.label: [tested(*item) for item in row.results.items()] for row in self.rows}
        return Verdict.of_runs(rows, natural=self.natural)

    @property
    def unequal(self) -> list[str]:
        """A sentence for each kind of work in which rows differ from the first one by more than a tenth."""
        known = {row.label: work for row in self.rows if (work := row.work)}
        sentences = []
        for does, numbers in (
            ("takes {} steps", {label: work.steps for label, work in known.items()}),
            ("reads {} tokens", {label: work.tokens for label, work in known.items()}),
        ):
            first, least = next(iter(numbers.items()), ("", 0.0))
            if unlike := [f"{label} {few(own)}" for label, own in numbers.items() if abs(own - least) > TENTH * least]:
                own, rest = does.format(few(least)), ", ".join(unlike)
                sentences.append(f"Not at equal work: a client of {first} {own} in all, and one of {rest}.")
        return sentences

    @property
    def by_validation(self) -> dict[str, float]:
        """The rows with their mean validation scores, the best first, without the control, which no federation can
        have; empty unless each has one for every seed."""
        rows = [row for row in self.rows if row.method != CONTROL]
        found = {row.label: [result.validation for result in row.results.values()] for row in rows}
        if any(None in scores or len(scores) < len(self.seeds) for scores in found.values()):
            return {}
        means = {label: fmean(score for score in scores if score is not None) for label, scores in found.items()}
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    @property
    def failed(self) -> str:
        return ", ".join(f"{row.label} seed {seed}" for row in self.rows for seed in row.failures)

    def as_json(self) -> dict[str, Json]:
        """Per row the scores by seed, mean and std per client, bytes and parameters. `base` and `rule` are those of all
        rows; null where rows have others, which `baselines` lists."""
        known, verdict = self.baselines, self.verdict
        baselines = {kind: [self._row_json(row) for row in known.get(kind, ()) if row.results] for kind in BASELINES}
        values: dict[str, Json] = {
            "metric": self.metric,
            "std": "of the sample over seeds, divided by n - 1; null for one seed",
            "seeds": list(self.seeds),
            "drawn": verdict.drawn,
            "adapter": self.adapter,
            **{kind: rows[0] if len(rows) == 1 else None for kind, rows in baselines.items()},
            "baselines": baselines,
            "rows": [self._row_json(row) for row in self.rows],
            "unequal": self.unequal,
            "verdict": verdict.as_json(),
            "notes": self.notes,
        }
        return values | ({"unscored": self.unscored} if self.unscored else {})

    def _row_json(self, row: ComparisonRow) -> dict[str, Json]:
        def plain(score: Value) -> Json:
            return asdict(score) if isinstance(score, MeanAndStd) else None

        by_seed: dict[str, Json] = {}
        for seed in self.seeds:
            if seed in row.results:
                result = asdict(row.results[seed])
                by_seed[str(seed)] = {key: value for key, value in result.items() if value or key not in _ONLY_IF_ANY}
            elif seed in row.failures:
                by_seed[str(seed)] = f"failed: {row.failures[seed]}"
        return {
            "label": row.label,
            "words": row.words,
            "method": row.method,
            "seeds": by_seed,
            "clients": {id: plain(row.client(id)) for id in self.clients},
            **{column.key: plain(column.value(row)) for column in SUMMARIES},
            **({"beside": {name: plain(row.beside(name)) for name in self.beside}} if self.beside else {}),
            "work": asdict(row.work) if row.work else None,
            "bytes": asdict(row.traffic) if row.traffic else None,
            "parameters": asdict(row.parameters),
        }

    def as_csv(self) -> str:
        """A line per row, plain numbers; an unknown one is empty."""
        from pandas import DataFrame  # takes a second to import

        costs = {"work": ClientWork, "bytes": Traffic, "parameters": Parameters}
        lines = []
        for row in self.shown:
            line: dict[str, Json] = {"label": row.label, "method": row.method, "seeds done": len(row.results)}
            for column in self._scores([*self.clients, *self.unscored]):
                score = column.value(row)
                known = asdict(score) if isinstance(score, MeanAndStd) else {"mean": None, "std": None}
                line |= {f"{column.key} {key}": value for key, value in known.items()}
            for (name, kind), cost in zip(costs.items(), (row.work, row.traffic, row.parameters), strict=True):
                known = asdict(cost) if cost else dict.fromkeys(each.name for each in fields(kind))
                line |= {f"{name} {key}": value for key, value in known.items()}
            lines.append(line)
        return DataFrame(lines).to_csv(index=False, lineterminator="\n")

    def as_markdown(self) -> str:
        lines = [self.heads, ["---", *["---:"] * (len(self.heads) - 1)]]
        for row, cells in self.cells(self.columns):
            lines.append([row.label, *(f"**{text}**" if best else text for text, best in cells)])
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        text = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
        notes = "".join(f"- {note}\n" for note in [*self.all_notes(), *self.unequal])
        return f"{text}\n\n{notes}{self.verdict.as_markdown()}"

    __str__ = as_markdown

    def _repr_html_(self) -> str:
        """What a notebook shows: the table, which scrolls where it is wide, and the verdict."""
        from pandas import DataFrame

        texts = {row.label: [text for text, _ in cells] for row, cells in self.cells(self.columns)}
        rows = DataFrame(texts, self.heads[1:]).T
        said = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.verdict.sentences)
        return f'<div style="overflow-x: auto">{rows.to_html()}</div><ul>{said}</ul>'

    @property
    def frames(self) -> TableFrames:
        """The table as data frames."""
        from pandas import DataFrame

        runs = [(row, seed, result) for row in self.rows for seed, result in row.results.items()]
        scores = [(row.label, seed, id, score) for row, seed, each in runs for id, score in each.clients.items()]
        means = [(row.label, seed, row.method, each.average, each.worst_half, each.folder) for row, seed, each in runs]
        return TableFrames(
            DataFrame(scores, columns=["label", "seed", "client", "score"]),
            DataFrame(means, columns=["label", "seed", "method", "average", "worst_half", "folder"]),
        )

    @property
    def columns(self) -> list[Column]:
        """All behind the name of a row; clients have one each where they are few."""

        def of_all(number: int, *_: object) -> str:
            return f"{number}" if number == len(self.seeds) else f"{number} of {len(self.seeds)}"

        seeds = Column("seeds", lambda row: len(row.results), of_all, terminal="seeds")
        return [*self._scores(self._few_clients), seeds, *COSTS]

    def _scores(self, clients: Sequence[str]) -> list[Column]:
        """Of single clients, of all, and what was measured beside."""
        single = [Column(id, partial(ComparisonRow.client, id=id), key=f"client {id}") for id in clients]
        beside = [
            Column(name, partial(ComparisonRow.beside, name=name), key=name, terminal=name.replace(" ", "\n"))
            for name in self.beside
        ]
        return [*single, *SUMMARIES, *beside]

    @property
    def heads(self) -> list[str]:
        return ["method", *(column.title for column in self.columns)]

    def cells(self, columns: Sequence[Column], short: bool = False) -> list[tuple[ComparisonRow, list[Cell]]]:
        """Each row with its cells under these columns."""
        best = self.verdict.column.best
        found = []
        for row in self.shown:
            marked = bool(row.method) and row.label in best
            texts = [column.write(row, self.adapter, short) for column in columns]
            found.append((row, [(text, column.judged and marked) for text, column in zip(texts, columns, strict=True)]))
        return found

    def for_terminal(self) -> list[RichTable | Text]:
        """Of few rows the clients' scores, a line per client; of all rows the columns that have a title there. A
        terminal is narrow: the rest stands in the files alone."""
        single = self._scores(self._few_clients)[: len(self._few_clients)]
        # so that 80 characters have room for the names of rows
        shown = [column for column in self.columns if column.terminal and not (self.beside and column.held)]
        lines = [
            (Text(row.label), [Text(text, style="bold green" if best else "") for text, best in cells])
            for row, cells in self.cells(single + shown, short=True)
        ]
        tables: list[RichTable | Text] = []
        if single and len(self.rows) <= MAX_TERMINAL_ROWS:
            clients = table_of_numbers(with_range(self.metric), "client", [row.label for row in self.shown])
            for number, column in enumerate(single):
                clients.add_row(Text(column.title), *(cells[number] for _, cells in lines))
            tables.append(clients)
        adapter = f"1× is one adapter of {self.adapter:,} parameters"
        title = f"{with_range(self.metric)}; bytes that a client sends over the run; {adapter}"
        averages = table_of_numbers(title, "method", [column.terminal for column in shown])
        for label, cells in lines:
            averages.add_row(label, *cells[len(single) :])
        return [*tables, averages, *map(Text, [*self._without_score(), *self.unequal, *self.verdict.for_terminal()])]

    @property
    def _few_clients(self) -> list[str]:
        everybody = [*self.clients, *self.unscored]
        return everybody if len(everybody) <= MAX_CLIENTS else []

    def all_notes(self) -> list[str]:
        seeds = ", ".join(map(str, self.seeds))
        over = f"mean ± sample standard deviation (divided by n - 1) over seeds {seeds}"
        over = over if len(self.seeds) > 1 else f"seed {seeds}"
        notes = [
            f"{with_range(self.metric)} on each client's test examples, {over}. Worst half: the mean over the half "
            "of the clients that score lowest, per seed.",
            "Bold in the column average: the rows that no other is shown to beat, where the verdict below shows that "
            "some row is beaten. Worst halves and scores of single clients are not judged.",
            "Steps, tokens (of whole image models pictures) and seconds are those of training, divided by the number "
            "of clients; runs that a merge starts from are included.",
            "Bytes are those of the serialised messages, per client: per round in which it is asked, and over the run.",
            "Parameters: on the server, in one message (down, up where they differ), on a client; "
            f"1× is one adapter of the configuration file, {self.adapter:,} parameters.",
        ]
        baselines = self.baselines
        notes += [_ABOUT[kind] for kind in baselines]
        if any(not row.results for rows in baselines.values() for row in rows):
            notes.append('"-": these runs have not scored it (eval.base; runs of earlier versions, or privacy.clip).')
        if len(self.clients) > MAX_CLIENTS:
            notes.append(f"The scores of {len(self.clients)} single clients are in table.csv and table.json.")
        if chosen := [f"{row} {mean:.2f}" for row, mean in self.by_validation.items()]:
            notes.append(f"By validation, best first: {', '.join(chosen)}.")
        notes += self._without_score()
        return [*notes, *chain.from_iterable(map(_troubles, self.rows)), *self.notes]

    def _without_score(self) -> list[str]:
        undefined = self._of_all(lambda result: result.undefined)
        notes = [not_defined(self.metric, undefined)] if undefined else []
        if unscored := [id for id in self.unscored if id not in undefined]:
            notes.append(f"{NOT_SCORED} So it is for {listed(unscored)}.")
        if uncounted := [id for id in self.uncounted if id not in undefined]:
            notes.append(
                "These clients have no training example, so rows of personal models leave them out, and they count in "
                f"no mean: {listed(uncounted)}."
            )
        return notes


def _troubles(row: ComparisonRow) -> Iterator[str]:
    """A note for each thing that went wrong in the runs of a row."""
    for seed, reason in row.failures.items():
        yield f"{row.label}, seed {seed} failed: {reason}"
    for seed, result in row.results.items():
        if said := [f"{event} ({count} times)" if count > 1 else event for event, count in result.events.items()]:
            yield f"{row.label}, seed {seed}: {', '.join(said)}; the report in its folder says more."
        if kinds := [warned["kind"] for warned in result.warnings]:
            several = "warnings" if len(kinds) > 1 else "warning"
            yield f"{row.label}, seed {seed}: {several} {', '.join(kinds)}; see its report."


def _mean_of(kind: type[Cost], seen: Sequence[Cost | None]) -> Cost | None:
    """Field by field the mean over the seeds; None where one of them does not know it."""
    known = [asdict(each) for each in seen if each]
    if not known or len(known) < len(seen):
        return None
    return kind(**{key: fmean(one[key] for one in known) for key in known[0]})


def means(line: Mapping[str, Any]) -> dict[str, float]:
    """By name the mean of what a line of scores has beside the score."""
    return {name: of["mean"] for name, of in line.get("beside", {}).items()}


def _known(rows: Sequence[ComparisonRow], kind: str) -> dict[str, Mapping[str, Any]]:
    """By `RunResult.shared` the line of a baseline."""
    results = [result for row in rows for result in row.results.values()]
    lines = [(result.shared, result.rule if kind == "rule" else result.base) for result in results]
    return {shared: line for shared, line in lines if line is not None}


def _baselines(rows: Sequence[ComparisonRow], kind: str) -> Iterator[ComparisonRow]:
    """A row for each group of rows that share what is known of a baseline."""
    known = _known(rows, kind)
    groups: list[tuple[list[str], dict[int, RunResult]]] = []
    for row in rows:
        own = {}
        for seed, line in ((seed, known.get(result.shared)) for seed, result in row.results.items()):
            if line is not None:
                rule = line if kind == "rule" else None
                own[seed] = RunResult(
                    "", 0, line["clients"], line["mean"], line["worst_half"], Traffic(), rule=rule, beside=means(line)
                )
        fits = (group for group in groups if all(group[1].get(seed, result) == result for seed, result in own.items()))
        labels, results = next(fits, ([], {}))
        if own and not labels:
            groups.append((labels, results))
        labels.append(row.label)
        results |= own
    for labels, results in groups:
        label = kind if len(groups) == 1 else f"{kind} of {', '.join(labels)}"
        yield ComparisonRow(label, [], "", Parameters(), results)


_ABOUT = {
    "base": "base: the base model without any adapter, before training.",
    "rule": "rule: of each client the rule that trains nothing and is best on its training examples, such as its most "
    "frequent answer; table.json names it.",
}
_SHORT = EngFormatter(places=2)


def to_text(table: Table) -> dict[str, str]:
    return {
        "table.md": table.as_markdown(),
        "table.csv": table.as_csv(),
        "table.json": json.dumps(table.as_json(), indent=1, ensure_ascii=False) + "\n",
    }
