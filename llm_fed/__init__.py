"""llm_fed: federated LoRA fine-tuning with personal models by merging."""

from typing import Any

__all__ = ["load_client", "load_image_model"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imports torch and transformers, which most commands of the command line need not
        from llm_fed.export import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
