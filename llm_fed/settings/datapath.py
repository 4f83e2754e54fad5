"""Where a user's data lies: a path is always one of this machine, and a Hub data set is written hf://owner/name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from llm_fed.basics.errors import UserError, closest

SCHEME = "hf://"
FROM_HUB = ("files", "classification", "regression")  # tasks that read data sets from the Hub by their ids


def check(key: str, given: str | None, task: str | None) -> None:
    """UserError for a path of data that is not there, and for a Hub data set where `task` reads none: where it was
    looked for, what is close to it, and how a Hub data set is written."""
    if given is None:
        return
    if hub_id(key, given) is None:
        local(key, given)
    elif task not in FROM_HUB:
        raise UserError(
            f"{key}={given!r}: only the task `{FROM_HUB[0]}` and its like read a Hub data set by its id; "
            f"give {task} a local file or folder, or leave {key} out"
        )


def hub_id(key: str, given: str) -> str | None:
    """The `owner/name` in `hf://owner/name`; None for any other text, which is a path of this machine. UserError where
    what follows hf:// is no id of a data set."""
    if not given.startswith("hf:/"):
        return None
    match = re.fullmatch(r"hf://?(\w[\w.-]*/\w[\w.-]*)", given, flags=re.ASCII)  # a Path makes one slash of two
    if match is None:
        raise UserError(f"{key}={given!r}: a Hub data set is written {SCHEME}owner/name")
    return match[1]


def local(key: str, given: str) -> Path:
    """The file or folder of this machine that the text names; UserError where it is not there, or a Hub id."""
    if given.startswith("hf:/"):
        raise UserError(f"{key}={given!r} is on the Hub, but a local file or folder is needed here")
    path, near = Path(given), None
    try:
        path = Path(os.path.expanduser(path))
        if given and path.exists():  # "" would be the folder that one is in
            return path
        near = _near(path)
    except (OSError, ValueError, RuntimeError):  # too long for a name, no right to look there, no such user's ~
        pass
    hint = f"; the closest is {str(near)!r}" if near else ""
    raise UserError(
        f"{key}={given!r}: there is no such file or folder (looked for {Path.cwd() / path}{hint}). "
        f"A Hub data set is written {SCHEME}owner/name."
    )


def _near(path: Path) -> Path | None:
    """What most likely is meant by a path that is not there, as far as its folders exist."""
    folder = next((parent for parent in path.parents if parent.exists()), None)
    if folder is None or not folder.is_dir():
        return None
    name = closest(path.relative_to(folder).parts[0], [each.name for each in folder.iterdir()])
    return folder / name if name else None
