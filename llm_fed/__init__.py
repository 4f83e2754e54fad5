"""llm_fed: federated LoRA fine-tuning with personal models by merging."""

import sys
from importlib import import_module
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name in _HOMES and sys.platform == "win32":
        raise ImportError("llm_fed runs on Linux and macOS; on Windows, install it in WSL (wsl --install)")
    if name in _HOMES:  # imports torch and transformers, which most commands of the command line need not
        return getattr(import_module(_HOMES[name]), name)
    if name == "network":  # for `llm_fed.network.patch` behind `import llm_fed` alone
        return import_module("llm_fed.network")
    if name == "__version__":
        return import_module("importlib.metadata").version("llm-fed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
