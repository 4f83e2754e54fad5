"""What the files hold that a configuration names by their paths: data and base are the same under any path, on any
machine, where their files are the same byte for byte, whatever their sizes and times.

Each file's SHA-256 is computed as `sha256sum` does, a few files at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from llm_fed.settings import object_contents, objects, plugins
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, flat
from llm_fed.settings.paths import cached

Files = Mapping[str, str]  # by path below what is named, the SHA-256; a file that is named itself has the path "."

KEYS = ("base.name", "task.path", "task.server.path")
_CHUNK = 2**20
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


class Contents:
    """The files that configurations name. Each path is read once, so an object of this class is for one command."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str | None], Files] = {}

    def of(self, config: Config) -> dict[str, Files]:
        """By key of the configuration, what it names; without those that name no files of this machine."""
        values = flat(as_dict(config))
        keys = dict.fromkeys([*KEYS, *own_keys(values)])
        named = {key: self.named(key, values.get(key), values["base.revision"]) for key in keys}
        return {key: files for key, files in named.items() if files is not None}

    def named(self, key: str, name: Any, revision: str | None = None) -> Files | None:
        """The files that a key's value names; None where it names none, such as a data set of the Hub."""
        if not isinstance(name, str) or not name:
            return None
        is_base = key == "base.name"
        requested = key, name, revision if is_base else None
        if requested not in self._known and (objects.is_object(name) or plugins.is_named(key, name)):
            self._known[requested] = _of_code(key, name)
        if requested not in self._known:
            location = base_folder(name, revision) if is_base else Path(os.path.expanduser(name))
            if location is None or not os.path.exists(location):
                return None
            self._known[requested] = _digests(location, is_base)
        return self._known[requested]


def own_keys(values: Mapping[str, Any]) -> list[str]:
    """The keys of a flat configuration that name objects of the program around, or code of the user's own."""
    return [
        key
        for key in dict.fromkeys([*objects.KEYS, *plugins.GROUP])
        if objects.is_object(name := values.get(key)) or plugins.is_named(key, name)
    ]


def _of_code(key: str, name: str) -> Files:
    if objects.is_object(name):
        return object_contents.of_object(key, objects.find(key, name))
    return object_contents.of_code(plugins.find(key, name, plugins.GROUP[key], ()))


def difference(before: Files, now: Files) -> str:
    """Which files are others now, in words; empty where none is."""
    unknown = object_contents.UNKNOWN
    parts = [f"{path} is {now[path]}" for path in before if now.get(path, "").startswith(unknown)]
    parts += [f"{path} differs" for path in before if path in now and now[path] not in (before[path], *parts)]
    parts += [f"{path} is missing" for path in before if path not in now]
    parts += [f"{path} is new" for path in now if path not in before]
    more = len(parts) - _NAMED
    return ", ".join(parts[:_NAMED]) + (f", and {more} more" if more > 0 else "")


def translated(saved: dict[str, Any], recorded: Mapping[str, Files], config: Config, contents: Contents) -> list[str]:
    """Write into a saved configuration, as nested values, the paths of another one wherever they name files with the
    same contents; the keys whose paths were written. `recorded` is what the files held that the saved one names."""
    now, before, moved = flat(as_dict(config)), flat(saved), []
    for key, files in recorded.items():
        if key not in KEYS or now.get(key) == before.get(key):
            continue
        own = contents.named(key, now.get(key), now["base.revision"])
        if own is not None and not difference(files, own):
            _put(saved, key, now[key])
            if key == "base.name":
                _put(saved, "base.revision", now["base.revision"])
            moved.append(key)
    return moved


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def base_folder(name: str, revision: str | None) -> Path | None:
    """Where the files of a base lie: its folder, or that of the Hub's cache; None where there is neither."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or not name:
        return None
    return cached(name, revision)


def _digests(location: Path, is_base: bool) -> Files:
    """Of a file, or of all files of a folder that count."""
    paths = {".": location} if location.is_file() else dict(_base_files(location) if is_base else _data_files(location))
    with ThreadPool(min(_AT_ONCE, max(1, len(paths)))) as pool:  # for which a process that ends does not wait
        return dict(zip(paths, pool.map(_digest, paths.values(), chunksize=1), strict=True))


def _base_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if (path.name in _BASE_NAMES or path.name.endswith(_BASE_SUFFIXES)) and path.is_file():
            yield path.name, path


def _data_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for location, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if _counts(name))
        for name in sorted(filter(_counts, names)):
            path = Path(location, name)
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _counts(name: str) -> bool:
    name = name.lower()
    return not name.startswith((".", *_NO_DATA_NAMES)) and not name.endswith(_NO_DATA_SUFFIXES)


def _digest(path: Path) -> str:
    """Or why the file cannot be read."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                digest.update(view[:size])
    except OSError as error:  # whoever needs the file says it
        return error.strerror or "unreadable"
    return digest.hexdigest()
