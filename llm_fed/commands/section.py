"""The `compare` section of a configuration file, and the checks that need nothing that takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llm_fed.basics.documents import plain
from llm_fed.basics.errors import UserError, did_you_mean, require
from llm_fed.commands.own import NO_OBJECTS, OwnObjects
from llm_fed.scoring import scores
from llm_fed.settings import configfile, paths
from llm_fed.settings.config import Config


@dataclass(frozen=True)
class Rows:
    """What is compared: rows times seeds."""

    file: Config  # without the words of any row
    rows: dict[str, list[str]]  # by label: the words of the row alone
    seeds: list[int]
    cells: dict[tuple[str, int], Config]  # by label and seed
    own: OwnObjects  # instead of names, which must be at hand

    def check(self) -> None:
        """`check` of every row; its errors say in which row they were made."""
        for label in self.rows:
            with in_row(label):
                check(self.cells[label, self.seeds[0]])


def check(config: Config, *, data: bool = True) -> None:
    """Refuse wrong names, settings of the method and paths of data, the quickest checks first. UserError: the first
    mistake. `data`: whether this machine is where the clients' data lies."""
    if config.eval.metric is not None:
        scores.find(config.eval.metric)
    if data:
        paths.check("task.path", config.task.path, config.task.name)
        paths.check("task.server.path", config.task.server.path, config.task.server.name)
    from llm_fed import methods, tasks  # with torch, but not with transformers or datasets

    methods.build(config.method)
    for key, name in (("task.name", config.task.name), ("task.server.name", config.task.server.name)):
        if name is not None:
            tasks.find(name, key)
    require("task.partition.kind", config.task.partition.kind, tasks.KINDS)


def read_rows(
    path: Path,
    words: Sequence[str] = (),
    chosen: Sequence[str] = (),
    seeds: Sequence[int] = (),
    draws: int = 0,
    own: OwnObjects = NO_OBJECTS,
) -> Rows:
    """The rows that `chosen` names (default: all of the file) with `words` laid over each. UserError: the file or a row
    has a mistake; it says in which row.

    Args:
        chosen: labels of rows, or names of methods as plain rows.
        seeds: instead of those of the file (default: the configuration's own seed).
        draws: instead of seeds, so many new federations, each with a training of its own.
        own: objects instead of names, which must be at hand.
    """
    if draws and seeds:
        raise UserError(f"--draws {draws} is the same as --seeds {','.join(map(str, range(draws)))}; give only one")
    for word in words:
        key = word.partition("=")[0]
        if key.partition(".")[0] == "compare":
            raise UserError(f"{word} is no setting of a run; give --seeds or --methods, or change it in {path}")
        if key in ("method", "method.name", "seed"):
            raise UserError(f"{word} would make all rows the same; give --methods and --seeds instead")
    of_file, seeds_of_file = read_section(path)
    if not (of_file or chosen):
        raise UserError(f"{path} has no compare section; say what to compare, e.g. --methods local,fedit,fedmerge")
    words = [*own.words, *words]
    file = own.laid_over(configfile.load(path, words))
    seeds = list(dict.fromkeys(range(draws) if draws else seeds or seeds_of_file or [file.seed]))
    rows = {
        name: list(own.rows[name].words) if name in own.rows else of_file.get(name, [f"method={name}"])
        for name in chosen or of_file
    }
    cells = {}
    for seed in seeds:
        for label, of_row in rows.items():
            with in_row(label):
                config = configfile.load(path, [*of_row, *words, f"seed={seed}"])
                cells[label, seed] = own.laid_over(config, label)
                if draws:
                    _check_drawn(config)
    if others := [name for name in chosen if name not in of_file and name not in own.rows]:
        from llm_fed import methods
        from llm_fed.settings import plugins

        known = [*of_file, *methods.NAMES, *plugins.names(plugins.METHODS)]
        for name in others:
            if name not in known and ":" not in name:
                raise UserError(f"--methods: there is no row or method {name!r}{did_you_mean(name, known)}")
    return Rows(file, rows, seeds, cells, own)


def _check_drawn(config: Config) -> None:
    """Refuse a federation or a training that would be the same in every draw."""
    for part, seed in (("federation", config.seeds.federation), ("training", config.seeds.training)):
        if seed is not None:
            raise UserError(
                f"seeds.{part}={seed} is the same in every draw, but --draws makes a new federation and a new training "
                "for each; leave it out, or give --seeds"
            )


def read_section(path: str | Path) -> tuple[dict[str, list[str]], list[int]]:
    """The `compare` section of a file: by label the words of each row, and the seeds; empty without one. UserError: the
    file cannot be read, or the section is not as it should be."""
    section = plain(configfile.read(path).get("compare", {}))
    example = "compare: {seeds: [0, 1], rows: {some label: [method=fedit, adapter.rank=16]}}"
    if not isinstance(section, dict):
        raise UserError(f"{path}: compare is {section!r}; it takes a mapping, e.g. {example}")
    configfile.check_keys(section, ["seeds", "rows"], "compare.")
    rows, seeds = section.get("rows", {}), section.get("seeds", [])
    if not isinstance(rows, dict):
        raise UserError(f"{path}: compare.rows is {rows!r}; it takes labels with lists of words, e.g. {example}")
    for label, words in rows.items():
        if not (isinstance(words, list) and all(isinstance(word, str) and "=" in word for word in words)):
            raise UserError(
                f"{path}: row {label!r} is {words!r}; it takes a list of words such as local.lr=1e-4, in quotes where "
                "one has a colon and a space"
            )
        if "seed" in (word.partition("=")[0] for word in words):
            raise UserError(f"{path}: row {label!r} has a seed, but all rows have those of compare.seeds or --seeds")
    if not (isinstance(seeds, list) and all(type(seed) is int for seed in seeds)):
        raise UserError(f"{path}: compare.seeds is {seeds!r}; it takes a list of whole numbers")
    return {str(label): words for label, words in rows.items()}, seeds


@contextmanager
def in_row(label: str) -> Iterator[None]:
    """Mistakes in what happens here say in which row they were made."""
    try:
        yield
    except UserError as error:
        raise UserError(f"row {label!r}: {error}") from error
