"""llm_fed: federated LoRA fine-tuning with personal models by merging."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any
from warnings import warn

_HOMES = {
    "run": "llm_fed.commands.api",
    "compare": "llm_fed.commands.api",
    "open_run": "llm_fed.commands.api",
    "verdict": "llm_fed.commands.api",
    "Result": "llm_fed.commands.api",
    "load_client": "llm_fed.export.load",
    "load_image_model": "llm_fed.export.load",
}
__all__ = list(_HOMES)

# Modules by the names that they had up to version 0.3, below the room in which they are now.
_MOVED = {
    f"llm_fed.{old}": f"llm_fed.{room}.{old.rpartition('.')[2]}"
    for room, names in {
        "basics": "cgroups checksum errors files launchers mounts names rng signs spelling terminal turns waits",
        "bench": "experiment.bases experiment.build experiment.start experiment.taking_part eval.costs",
        "commands": "api",
        "mergers": "methods.potara methods.fisher_merging methods.interpolation methods.ties methods.dare "
        "methods.slerp methods.task_arithmetic",
        "kinds": "experiment.encoding",
        "method": "site requests optimizer losses methods.heads tasks.augmentation",
        "models": "export.prompt",
        "rows": "tasks.cells tasks.columns tasks.dialects tasks.encodings tasks.formats tasks.jsonrows tasks.layout "
        "tasks.pictures tasks.reading tasks.tables",
        "scoring": "eval.scores eval.rules eval.choices eval.notes",
        "settings": "config configfile contents datapath paths plugins references shipped",
        "state": "messages.compression messages.lowrank messages.outline messages.roles messages.wire",
    }.items()
    for old in names.split()
} | {
    "llm_fed.eval.clients": "llm_fed.scoring.evaluation",
    "llm_fed.messages": "llm_fed.state",
    "llm_fed.tasks.rows": "llm_fed.rows",
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module under its old name, with a DeprecationWarning; what it holds is the same."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return spec_from_loader(name, self, is_package=name == "llm_fed.messages") if name in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        now = _MOVED[module.__name__]
        warn(f"{module.__name__} is {now} now (CHANGELOG.md)", DeprecationWarning, stacklevel=2)
        module.__dict__.update({key: value for key, value in vars(import_module(now)).items() if key[:2] != "__"})


sys.meta_path.insert(0, _Moved())  # before a folder of this name that an older checkout left


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # imports torch and transformers, which most commands of the command line need not
        return getattr(import_module(_HOMES[name]), name)
    if name == "network":  # for `llm_fed.network.patch` behind `import llm_fed` alone
        return import_module("llm_fed.network")
    if name == "__version__":
        return import_module("importlib.metadata").version("llm-fed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
