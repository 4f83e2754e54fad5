"""Work of all clients of one node side by side, where whatever one of them does ends that one alone."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from copy import copy
from typing import Any

from llm_fed.method.client import Client
from llm_fed.method.requests import Runtime


def each(items: Mapping[str, Any], do: Callable[[str, Any], Any]) -> dict[str, Any]:
    """By client what `do` makes of its item, or the exception that ended it, now or before."""
    outcomes: dict[str, Any] = {}
    for name, item in items.items():
        try:
            outcomes[name] = item if isinstance(item, Exception) else do(name, item)
        except Exception as error:  # of any kind, since it is one client's
            outcomes[name] = error
    return outcomes


def fused(
    runtime: Runtime, sites: Mapping[str, Any], start: Callable[[Client], Coroutine[Any, Any, Any]]
) -> dict[str, Any]:
    """By client what its coroutine returns, or the exception that ended it, now or before.

    An error in a pass that clients share (a batch that does not fit into memory, say) belongs to none of them, so each
    of them then works alone, and whoever made it fails.

    Args:
        sites: by client its site, or the exception that ended it.
    """
    working = {name: site for name, site in sites.items() if not isinstance(site, Exception)}
    before = {name: (copy(site.memory), list(site.losses), site.fits) for name, site in working.items()}

    def alone(name: str, site: Client) -> Any:
        site.memory, site.losses, site.fits = before[name]
        return runtime.run({name: start(site)})[name]

    try:
        outcomes = runtime.run({name: start(site) for name, site in working.items()})
    except Exception as error:
        if len(working) > 1:
            said = f"{type(error).__name__}: {error}"
            print(f"{', '.join(working)}: {said} in a pass that they share; now one after another", flush=True)
        outcomes = each(working, alone) if len(working) > 1 else dict.fromkeys(working, error)
    return {name: outcomes.get(name, site) for name, site in sites.items()}
