"""Clients on other machines: the server's side, the nodes' side, and Flower as the carrier."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_fed.network.trainer import patch as patch


def __getattr__(name: str) -> Any:
    if name == "patch":  # imports torch, which nothing else here needs so early
        from llm_fed.network.trainer import patch

        return patch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
