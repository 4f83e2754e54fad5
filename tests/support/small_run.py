"""A whole run that takes seconds: a tiny random base, three clients with conflicting data, and its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tiny_base

from llm_fed.basics import documents

CLIENTS = {"ada": (4, 5), "bob": (7, 8), "cyd": (10, 11)}  # id -> the two words that its answers are made of
SIZES = {"train": 6, "validation": 2, "test": 3}


@dataclass(frozen=True)
class Small:
    """Where the parts lie; the folders are shared by a whole test session and must not be changed.

    Attributes:
        scored: settings of what is scored beside the clients' own models; without it a run takes a fifth less.
    """

    base: Path
    data: Path
    scored: Mapping[str, bool] = field(default_factory=lambda: {"cross": False, "base": False})

    def as_usual(self) -> Small:
        """The same, with all that a run scores where nothing is said."""
        return replace(self, scored={})

    def tree(self, **changes: Any) -> dict[str, Any]:
        """The configuration as nested values; a section in `changes` is laid over the one here."""
        tree: dict[str, Any] = {
            "seed": 0,
            "rounds": 3,
            "base": {"name": str(self.base), "dtype": "float32"},
            "adapter": {"rank": 2, "alpha": 8, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]},
            "task": {"name": "files", "path": str(self.data), "max_length": 32, "template": "plain"},
            "method": {"name": "fedit"},
            "local": {"steps": 2, "batch_size": 2, "lr": 0.05, "lr_end": 0.02},
            "eval": {"every": 1, "metric": "rouge1", "max_new_tokens": 3, **self.scored},
            "device": "cpu",
        }
        for key, value in changes.items():
            laid_over = key != "method" and isinstance(value, dict)
            tree[key] = {**tree.get(key, {}), **value} if laid_over else value
        return tree

    def config(self, path: Path, **changes: Any) -> Path:
        """The configuration as a YAML file at `path`."""
        path.write_text(documents.dump(self.tree(**changes)))
        return path


def make(folder: Path) -> Small:
    """The base and the data, written below `folder`."""
    base = tiny_base.folder(folder / "base")
    return Small(base, write_data(folder / "data"))


def write_data(folder: Path, sizes: dict[str, int] | None = None) -> Path:
    """One folder per client. A row of `ada/train.jsonl`: {"instruction": "w20 w21", "output": "w4 w5"}"""
    for client, (first, second) in CLIENTS.items():
        (folder / client).mkdir(parents=True)
        for split, size in (sizes or SIZES).items():
            rows = [{"instruction": f"w{20 + i} w{21 + i}", "output": f"w{first} w{second}"} for i in range(size)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / client / f"{split}.jsonl").write_text(text)
    return folder
