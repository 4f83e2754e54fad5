"""Whole runs on images: how each method that suits whole models is configured, and what kills such a run."""

from pathlib import Path
from typing import Any

import tiny_images

from llm_fed.runs.tracking import Reporter

LATE = {"delay": {"sigma": 1.0}, "participation": 0.7}
TESTED = {"task": {"server": {"examples": 6, "test": True}}}  # at the server, of one model for all
UNLIKE = {"base": {"name": "cnn", "clients": ["cnn", "resnet-9"]}}  # 64 features before the head in both
WITH_DATA = {"task": {"server": {"examples": 6}}}
RUNS: dict[str, dict[str, Any]] = {
    "local": {"method": {"name": "local"}},
    "fedit": {"method": {"name": "fedit"}, "eval": {"cross": "auto", "base": True}, **TESTED, **LATE},
    "fedlora": {"method": {"name": "fedlora", "personal_share": 0.25}},
    "ifca": {"method": {"name": "ifca", "num_models": 2, "warmup_rounds": 1}},
    "fedmerge": {"method": {"name": "fedmerge", "num_models": 3}},
    "fedmerge-fixed": {"method": {"name": "fedmerge-fixed", "num_models": 3, "models_per_client": 2}},
    "fedasync": {"method": {"name": "fedasync"}, **LATE},
    "fedbuff": {"method": {"name": "fedbuff", "buffer": 2}, **LATE},
    "ca2fl": {"method": {"name": "ca2fl", "buffer": 2}, **LATE},
    "center": {"method": {"name": "center"}, **TESTED},
    "fed+ft": {"method": {"name": "fed+ft"}, **TESTED, **LATE},
    "hfcl": {"method": {"name": "hfcl"}, **WITH_DATA, **LATE},
    "feddf": {"method": {"name": "feddf"}, **WITH_DATA, **LATE},
    "feddle": {"method": {"name": "feddle", "search_lr": 0.05}, **TESTED, **LATE},
    "feddle out of domain": {
        "method": {"name": "feddle", "search_lr": 0.05},
        "task": {"server": {"name": "images", "examples": None, "test": True}},
        **LATE,
    },
    "fedbn": {"method": {"name": "fedbn"}, "base": {"name": "resnet-9"}, **LATE},
    "fedmoe": {"method": {"name": "fedmoe", "gate_lr": 0.01}, **UNLIKE, **LATE},
    "pfedmoe": {"method": {"name": "pfedmoe"}},
    "fedem": {"method": {"name": "fedem", "num_models": 2}, "participation": 0.7},
    "lg-fedavg": {"method": {"name": "lg-fedavg"}, **LATE},
    "fd": {"method": {"name": "fd"}, **UNLIKE, **LATE},
    "fedproto": {"method": {"name": "fedproto"}, **LATE},
    "fml": {"method": {"name": "fml"}, **UNLIKE},
    "fedkd": {"method": {"name": "fedkd"}},
    "fedkd of unlike models": {"method": {"name": "fedkd"}, **UNLIKE, **LATE},
    "fedapen": {"method": {"name": "fedapen"}, **UNLIKE, **LATE},
}  # fmt: skip


def configured(data: Path, name: str, **changes: Any) -> dict[str, Any]:
    tree = tiny_images.tree(data, **{**RUNS[name], **changes})
    server = tree["task"].get("server", {})
    if server.get("name"):
        tree["task"]["server"] = {**server, "path": str(data.parent / "other.npz")}
    return tree


class Killer(Reporter):
    """Ends the process, as far as the run can tell, in the middle of a round."""

    def __init__(self, round: int):
        super().__init__()
        self.last = round

    def record(self, record: Any) -> None:
        if (record["kind"], record.get("round")) == ("round", self.last):
            raise KeyboardInterrupt
