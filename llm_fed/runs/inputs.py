"""inputs.json: what a run's data and base hold, so that it goes on with the same ones from wherever they lie, and not
with others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import RunError, UserError
from llm_fed.runs.records import read_object
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, flat
from llm_fed.settings.contents import Contents, Files, difference, own_keys
from llm_fed.settings.objects import WORD, is_object

FILE = "inputs.json"


def read(folder: Path) -> dict[str, Files]:
    """By key of the configuration, the files that it named in a run folder; empty of runs of earlier versions.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / FILE
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}; start again with --fresh") from error


def check_base(folder: Path, base: Mapping[str, Any], recorded: Mapping[str, Files], contents: Contents) -> None:
    """Refuse to continue a run with other files of its base under the same name.

    Args:
        base: the section `base` of the configuration.

    Raises:
        UserError: which files.
    """
    now = contents.named("base.name", base["name"], base["revision"])
    if now is None or "base.name" not in recorded or not (changed := difference(recorded["base.name"], now)):
        return
    if is_object(base["name"]):
        raise UserError(
            f"the model given as base= is not the one any more with which the run {folder} began: {changed}. Give the "
            "old one to continue it, another out=, or fresh=True to start again"
        )
    raise UserError(
        f"base.name={base['name']!r} is not the base any more with which the run {folder} began: {changed}. Put the "
        "old files back to continue it (base.revision names an older version on the Hub), give another --out, or start "
        "again with --fresh"
    )


def check_finished(folder: Path, config: Config, contents: Contents) -> None:
    """Refuse to hand out a finished run for other objects of the same names, or other code of the user's own.

    Raises:
        UserError: which have changed, and what to do.
    """
    recorded, values = read(folder), flat(as_dict(config))
    for key in own_keys(values):
        now = contents.named(key, values[key]) if key in recorded else None
        if now is not None and (changed := difference(recorded[key], now)):
            if is_object(values[key]):
                raise UserError(
                    f"{folder} is finished, and was given another {WORD[key]}= ({changed}); give another out=, or "
                    "fresh=True to train again"
                )
            raise UserError(
                f"{folder} is finished, and the code of {key}={values[key]} was another then ({changed}); give another "
                "--out, or --fresh to train again"
            )


def words(key: str, value: Any, revision: str | None, recorded: Mapping[str, Files], contents: Contents) -> str:
    """What a refused change of a path means for its files, in words; empty where that is not known.

    Args:
        value: the key's, now.
    """
    now = contents.named(key, value, revision) if key in recorded else None
    return "" if now is None else f", where {difference(recorded[key], now)}"
