"""inputs.json: what a run's data and base hold, so that it goes on with the same ones from wherever they lie, and not
with others. Data and base are the same under any path, on any machine, where their files are the same byte for byte.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, listed
from llm_fed.runs.records import recall
from llm_fed.settings import object_contents, objects, plugins
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, flat
from llm_fed.settings.paths import base_folder

FILE = "inputs.json"
Files = Mapping[str, str]  # by path below what is named, the SHA-256; a file that is named itself has the path "."

KEYS = ("base.name", "task.path", "task.server.path")
_AT_ONCE = 8  # files that are read at the same time
_NAMED = 3  # files that a message names
# What transformers reads of a base's folder; all else there may change.
_BASE_NAMES = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json",
}  # fmt: skip
_BASE_SUFFIXES = (".safetensors", ".safetensors.index.json", ".model", ".tiktoken", ".gguf")
# What lies beside data and is none.
_NO_DATA_SUFFIXES = (".md", ".py", ".sh", ".ipynb", ".pdf", ".docx", ".log", ".yaml", ".yml")
_NO_DATA_NAMES = ("readme", "license", "licence", "thumbs.db", "desktop.ini", "__macosx")


@dataclass
class Contents:
    """The files that configurations name. Each path is read once, so an object of this class is for one command."""

    known: dict[tuple[str, str, str | None], Files] = field(default_factory=dict)

    def of(self, config: Config) -> dict[str, Files]:
        """By key of the configuration, what it names; without those that name no files of this machine."""
        values = flat(as_dict(config))
        keys = dict.fromkeys([*KEYS, *own_keys(values)])
        named = {key: self.named(key, values.get(key), values["base.revision"]) for key in keys}
        return {key: files for key, files in named.items() if files is not None}

    def named(self, key: str, name: Json, revision: str | None = None) -> Files | None:
        """The files that a key's value names; None where it names none, such as a data set of the Hub."""
        if not isinstance(name, str) or not name:
            return None
        is_base = key == "base.name"
        requested = key, name, revision if is_base else None
        if requested not in self.known and own_keys({key: name}):
            if objects.is_object(name):
                self.known[requested] = object_contents.of_object(key, objects.find(key, name))
            else:
                self.known[requested] = object_contents.of_code(plugins.find(key, name, plugins.GROUP[key], ()))
        if requested not in self.known:
            location = base_folder(name, revision) if is_base else Path(os.path.expanduser(name))
            if location is None or not os.path.exists(location):
                return None
            paths = dict(_files(location, is_base))
            with ThreadPool(min(_AT_ONCE, max(1, len(paths)))) as pool:  # for which a process that ends does not wait
                digests = pool.map(_digest, paths.values(), chunksize=1)
            self.known[requested] = dict(zip(paths, digests, strict=True))
        return self.known[requested]


def own_keys(values: Mapping[str, Any]) -> list[str]:
    """The keys of a flat configuration that name objects of the program around, or code of the user's own."""
    keys = dict.fromkeys([*objects.KEYS, *plugins.GROUP])
    written_so = [key for key in keys if ":" in str(values.get(key))]  # object::NAME, module:Name
    return [key for key in written_so if objects.is_object(values[key]) or plugins.is_named(key, values[key])]


def difference(before: Files, now: Files) -> str:
    """Describes which files have changed; empty where none has."""
    parts = []
    for path, held in before.items():
        found = now.get(path, "missing")
        if found == "missing" or found.startswith(object_contents.UNKNOWN):
            parts.append(f"{path} is {found}")
        elif found != held:
            parts.append(f"{path} differs")
    parts += [f"{path} is new" for path in now if path not in before]
    return listed(parts, _NAMED)


def translated(saved: dict[str, Any], recorded: Mapping[str, Files], config: Config, contents: Contents) -> list[str]:
    """Write into a saved configuration, as nested values, the paths of another one wherever they name files with the
    same contents; the keys whose paths were written. `recorded` is what the files held that the saved one names."""
    now, before, moved = flat(as_dict(config)), flat(saved), []
    for key, files in recorded.items():
        if key not in KEYS or now.get(key) == before.get(key):
            continue
        if (own := contents.named(key, now.get(key), now["base.revision"])) is not None and not difference(files, own):
            _put(saved, key, now[key])
            if key == "base.name":
                _put(saved, "base.revision", now["base.revision"])
            moved.append(key)
    return moved


def _put(tree: dict[str, Any], key: str, value: Json) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def _files(location: Path, is_base: bool) -> Iterator[tuple[str, Path]]:
    """A file, or all files of a folder that count."""
    if location.is_file():
        yield ".", location
    elif is_base:
        for path in sorted(location.iterdir()):
            if (path.name in _BASE_NAMES or path.name.endswith(_BASE_SUFFIXES)) and path.is_file():
                yield path.name, path
    else:
        for folder, folders, names in os.walk(location, followlinks=True):
            folders[:] = sorted(filter(_counts, folders))
            for name in sorted(filter(_counts, names)):
                path = Path(folder, name)
                if path.is_file():
                    yield path.relative_to(location).as_posix(), path


def _counts(name: str) -> bool:
    name = name.lower()
    return not name.startswith((".", *_NO_DATA_NAMES)) and not name.endswith(_NO_DATA_SUFFIXES)


def _digest(path: Path) -> str:
    """Or why the file cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # whoever needs the file says it
        return error.strerror or "unreadable"


def read(folder: Path) -> dict[str, Files]:
    """By key of the configuration, the files that it named in a run folder; empty of a merge's. RunError: the file is
    damaged."""
    return recall(folder / FILE) or {}


def check_base(folder: Path, base: Mapping[str, Any], recorded: Mapping[str, Files], contents: Contents) -> None:
    """Refuse to continue a run with other files of its base under the same name. UserError: which files. `base`: the
    section `base` of the configuration."""
    now = contents.named("base.name", base["name"], base["revision"])
    if now is None or "base.name" not in recorded or not (changed := difference(recorded["base.name"], now)):
        return
    raise UserError(
        f"base.name={base['name']!r} is not the base any more with which the run {folder} began: {changed}. Give the "
        "old one back to continue it (base.revision names an older version on the Hub), give another --out (out=), or "
        "start again with --fresh (fresh=True)"
    )


def check_finished(folder: Path, config: Config, contents: Contents) -> None:
    """Refuse to hand out a finished run for other objects of the same names, or other code of the user's own.
    UserError: which have changed, and what to do."""
    recorded, values = read(folder), flat(as_dict(config))
    for key in own_keys(values):
        now = contents.named(key, values[key]) if key in recorded else None
        if now is not None and (changed := difference(recorded[key], now)):
            what = f"{objects.WORD[key]}=" if objects.is_object(values[key]) else f"{key}={values[key]}"
            raise UserError(
                f"{folder} is finished, and {what} was another then ({changed}); give another --out "
                "(out=), or --fresh (fresh=True) to train again"
            )


def words(key: str, value: Json, revision: str | None, recorded: Mapping[str, Files], contents: Contents) -> str:
    """What a refused change of a path means for its files, in words; empty where that is not known. `value`: the key's,
    now."""
    now = contents.named(key, value, revision) if key in recorded else None
    return "" if now is None else f", where {difference(recorded[key], now)}"
