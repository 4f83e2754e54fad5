"""What goes wrong at a node ends the work of one client alone, and has two forms: the server is told a code and words
that say nothing of this machine; the text, which may quote its rows, its folders and its settings, goes to this
machine's own log.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Coroutine, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import ClientError, RunError, UserError
from llm_fed.settings.plugins import NotAllowed

if TYPE_CHECKING:
    from llm_fed.method.requests import Runtime
    from llm_fed.method.site import Site

Item = TypeVar("Item")
Who = TypeVar("Who", bound="Site")
Result = TypeVar("Result")

WORDS = {
    "protocol": "the node speaks another version of the protocol; install the same llm_fed at both",
    "setup": "the node's operator has not said what it serves, or its policy cannot be read",
    "code": "the node's operator has not allowed code from outside llm_fed that is named",
    "policy": "the node's owner does not allow it",
    "secure": "the client does not do what might open its update",
    "client": "the node has no data of this client now",
    "forgot": "the client's memory of that round is gone, so it begins again",
    "disk": "the node's disk is full",
    "failed": "the node could not do it",
}


class Refused(UserError):
    """What this machine does not do for a server, which is told `code`: a word of WORDS, and a dot and a detail."""

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


def told(error: Exception) -> dict[str, Json]:
    """What the server is told of an error, whose text is printed here."""
    code = _code(error)
    print(f"{code}: {type(error).__name__}: {error}", flush=True)
    if not isinstance(error, UserError | RunError | ClientError | OSError):
        traceback.print_exception(error)
    return {"code": code, "error": f"{WORDS[code.partition('.')[0]]} ({code}); its log says more"}


def _code(error: Exception) -> str:
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, NotAllowed):
        return "code"
    own = error.__cause__ if isinstance(error, RunError) else error  # a checkpoint's says so in words of its own
    return "disk" if isinstance(own, OSError) and own.errno in (errno.ENOSPC, errno.EDQUOT) else "failed"


def each(items: Mapping[str, Item | Exception], do: Callable[[str, Item], Result]) -> dict[str, Result | Exception]:
    """By client what `do` makes of its item, or the exception that ended it, now or before."""
    outcomes: dict[str, Result | Exception] = {}
    for name, item in items.items():
        try:
            outcomes[name] = item if isinstance(item, Exception) else do(name, item)
        except Exception as error:  # of any kind, since it is one client's
            outcomes[name] = error
    return outcomes


def fused(
    runtime: Runtime, sites: Mapping[str, Who | Exception], start: Callable[[Who], Coroutine[Any, Any, Result]]
) -> dict[str, Result | Exception]:
    """By client what its coroutine returns, or the exception that ended it, now or before.

    An error in a pass that clients share (a batch that does not fit into memory, say) belongs to none of them, so each
    of them then works alone, and whoever made it fails. `sites`: by client its site, or the exception that ended it.
    """
    working = {name: site for name, site in sites.items() if not isinstance(site, Exception)}
    before = {name: (copy(site.memory), list(site.losses), site.fits) for name, site in working.items()}

    def alone(name: str, site: Who) -> Result:
        site.memory, site.losses, site.fits = before[name]
        outcome = runtime.run({name: start(site)})[name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    try:
        outcomes: dict[str, Result | Exception] = runtime.run({name: start(site) for name, site in working.items()})
    except Exception as error:
        if len(working) > 1:
            said = f"{type(error).__name__}: {error}"
            print(f"{', '.join(working)}: {said} in a pass that they share; now one after another", flush=True)
        outcomes = each(working, alone) if len(working) > 1 else dict.fromkeys(working, error)
    return {name: site if isinstance(site, Exception) else outcomes[name] for name, site in sites.items()}
