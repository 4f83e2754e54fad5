"""Paths of this machine in a configuration: whole where a run reads them again, cut where others read them. Data lie at
a path of this machine, and a Hub data set is written hf://owner/name."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import IMAGE_MODELS, Config
from llm_fed.settings.objects import is_object

# What may be a path; the first may also be a name.
KEYS = ("base.name", "task.path", "task.server.path", "adapter.start")
HUB = "hf://"  # what begins so is no path, but a data set of the Hub
# A folder of the Hub's cache: which model it holds, and at which commit.
_CACHED = re.compile(r"/models--([^/]+)/snapshots/([^/]+)/")
# A path of this machine in a text: in quotation marks, where it may hold spaces, or up to the next space.
_IN_TEXT = re.compile(r"""(?<=')~?/[^'\n]+(?=')|(?<![\w.:/'])~?/[^\s'",;:)]+""")
FROM_HUB = ("files", "classification", "regression")  # tasks that read data sets from the Hub by their ids


def absolute(config: Config) -> Config:
    """The configuration with every path of a file or folder that exists as an absolute one, so that it means the same
    in any working directory. Names of models and data sets stay as they are."""
    base, task = config.base, config.task
    server = replace(task.server, path=_whole(task.server.path))
    is_folder = base.name not in IMAGE_MODELS and os.path.isdir(os.path.expanduser(base.name))
    name = _whole(base.name) if is_folder else base.name
    adapter = config.adapter and replace(config.adapter, start=_whole(config.adapter.start))
    task = replace(task, path=_whole(task.path), server=server)
    return replace(config, base=replace(base, name=name), adapter=adapter, task=task)


def same(key: str, one: Any, other: Any) -> bool:
    """Whether two values of a configuration's key mean the same, also where one is a relative path from here."""
    if key in KEYS and isinstance(one, str) and isinstance(other, str):
        return _real(one) == _real(other)
    return one == other


def public(value: Any) -> Any:
    """The value, in dictionaries and lists too, where every path of this machine is cut to its last name, and that of a
    model in the Hub's cache to its Hub id."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public(item) for item in value]
    if isinstance(value, str) and is_local(value):
        known = hub_snapshot(value)
        return known[0] if known else os.path.basename(os.path.abspath(os.path.expanduser(value)))
    return value


def public_text(text: str) -> str:
    """A sentence, a message or a `key=value` word, where every absolute path is cut to its last name."""
    return _IN_TEXT.sub(lambda match: os.path.basename(match[0].rstrip("/")), text)


def hub_snapshot(folder: str) -> tuple[str, str] | None:
    """The Hub id and the commit of a folder in the Hub's cache, or of a link to one; None of any other folder."""
    own = os.path.abspath(os.path.expanduser(folder))
    matches = (_CACHED.search(f"{path}/".replace(os.sep, "/")) for path in (own, os.path.realpath(own)))
    match = next(filter(None, matches), None)
    return (match[1].replace("--", "/"), match[2]) if match else None


def cached(name: str, revision: str | None) -> Path | None:
    """Where a Hub model lies in the Hub's cache, if it does."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def base_folder(name: str, revision: str | None) -> Path | None:
    """Where the files of a base lie: its folder, or that of the Hub's cache; None where there is neither."""
    folder = Path(os.path.expanduser(name))
    return folder if folder.is_dir() else cached(name, revision)


def is_local(name: str) -> bool:
    """Whether a name is a path, or an object of this program, rather than a Hub id or any other word."""
    if is_object(name):
        return True
    path = os.path.expanduser(name)
    return os.path.isabs(path) or name.startswith(("./", "../")) or os.path.exists(path)


def _whole(path: str | None) -> Any:
    exists = path is not None and not path.startswith(HUB) and os.path.exists(os.path.expanduser(path))
    return os.path.abspath(os.path.expanduser(str(path))) if exists else path


def _real(path: str) -> str:
    return path if path.startswith(HUB) else os.path.realpath(os.path.expanduser(path))


def check(key: str, given: str | None, task: str | None) -> None:
    """UserError for a path of data that is not there, and for a Hub data set where `task` reads none: where it was
    looked for, and how a Hub data set is written."""
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
        raise UserError(f"{key}={given!r}: a Hub data set is written {HUB}owner/name")
    return match[1]


def local(key: str, given: str) -> Path:
    """The file or folder of this machine that the text names; UserError where it is not there, or a Hub id."""
    if given.startswith("hf:/"):
        raise UserError(f"{key}={given!r} is on the Hub, but a local file or folder is needed here")
    path = Path(os.path.expanduser(given))
    if given and os.path.exists(path):  # "" would be the folder that one is in
        return path
    raise UserError(
        f"{key}={given!r}: there is no such file or folder (looked for {Path.cwd() / path}). "
        f"A Hub data set is written {HUB}owner/name."
    )
