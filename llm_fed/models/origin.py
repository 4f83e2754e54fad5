"""Origin: which base something was trained on, written so that another machine finds the same one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llm_fed.basics.documents import Json, load_json
from llm_fed.settings.config import BaseConfig
from llm_fed.settings.paths import cached, hub_snapshot, public

_SAMPLES, _SAMPLE = 4, 256  # parts of each tensor in a digest, and bytes of a part


@dataclass(frozen=True)
class Origin:
    """A base, and how it was loaded.

    Attributes:
        name: the Hub id, or the path of a folder that does not come from the Hub's cache.
        revision: of a Hub id the commit, where it is known, or the revision that was requested.
        quantization, dtype: as in `BaseConfig`; an unknown dtype is None.
        weights: a digest of its weights, see `weights_digest`; None where they are no files here.
    """

    name: str
    revision: str | None = None
    quantization: str | None = None
    dtype: str | None = None
    weights: str | None = None

    @classmethod
    def of(cls, config: BaseConfig) -> Origin:
        """Of a base that has been loaded as `config` says."""
        folder = Path(os.path.expanduser(config.name))
        local = os.path.isdir(folder)  # Path.is_dir raises where a name is too long
        location = folder if local else cached(config.name, config.revision)
        known = hub_snapshot(str(location)) if location else None
        name, revision = known or (config.name, None if local else config.revision)
        weights = weights_digest(location) if location else None
        return cls(name, revision, config.quantization, config.dtype, weights)

    @property
    def describe(self) -> str:
        """Name, revision, dtype and quantisation, for people."""
        at = f" at revision {self.revision}" if self.revision else ""
        how = ", ".join(filter(None, (self.dtype, self.quantization)))
        return f"{self.name}{at}" + (f" ({how})" if how else "")

    def same_weights(self, other: Origin) -> bool:
        """Whether two origins are the same model as far as is known: by their weights, else by what they are called. A
        base has one name on the Hub and others on disks, so of names only the last part counts."""
        if self.weights and other.weights:
            return self.weights == other.weights
        return Path(self.name).name == Path(other.name).name

    def public(self) -> Origin:
        """This origin without paths of this machine."""
        return replace(self, name=public(self.name))

    def as_json(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: Json) -> Origin:
        """What `as_json` has made. ValueError: it has not."""
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            raise ValueError("base is not an object with a name")
        known: dict[str, Any] = {key: values.get(key) for key in cls.__dataclass_fields__}
        if wrong := [key for key, value in known.items() if not isinstance(value, str | None)]:
            raise ValueError(f"base.{wrong[0]} is not a text")
        return cls(**known)


def weights_digest(folder: Path) -> str | None:
    """A digest of the weights in a folder's safetensors files, equal for copies of one model under any path and however
    they are divided into files; None where there are none, or they are damaged.

    Of each tensor it covers name, dtype and shape, and _SAMPLES parts of _SAMPLE bytes. So it takes milliseconds, and
    tells two models apart unless they differ in few rows alone.
    """
    index, tensors = folder / "model.safetensors.index.json", dict[str, bytes]()
    try:
        files = [folder / "model.safetensors"]
        if index.is_file():
            named = load_json(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = sorted({folder / name for name in named})
        for path in files:
            tensors |= _digests(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return hashlib.blake2b(b"".join(tensors[name] for name in sorted(tensors)), digest_size=16).hexdigest()


def _digests(path: Path) -> dict[str, bytes]:
    """Of the tensors of one file, by name."""
    tensors: dict[str, bytes] = {}
    with open(path, "rb") as file:
        start = int.from_bytes(file.read(8), "little")
        header: Mapping[str, Any] = load_json(file.read(min(start, path.stat().st_size)))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            seen = [json.dumps([name, entry["dtype"], entry["shape"]]).encode()]
            for part in range(_SAMPLES):
                file.seek(8 + start + first + max(0, last - first - _SAMPLE) * part // (_SAMPLES - 1))
                seen.append(file.read(min(_SAMPLE, last - first)))
            tensors[name] = hashlib.blake2b(b"".join(seen), digest_size=16).digest()
    return tensors
