"""Refusals: an error at a node has two forms. The server is told a code and words that say nothing of this machine; the
text, which may quote its rows, its folders and its settings, goes to this machine's own log.
"""

from __future__ import annotations

import errno
import traceback
from typing import Any

from llm_fed.basics.errors import ClientError, RunError, UserError
from llm_fed.settings.plugins import NotAllowed

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
    """What this machine does not do for a server, which is told `code` alone: a word of WORDS, and what it is about
    after a dot."""

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


def told(error: Exception) -> dict[str, Any]:
    """What the server is told of an error, whose text is printed here."""
    code = _code(error)
    print(f"{code}: {type(error).__name__}: {error}", flush=True)
    if not isinstance(error, UserError | RunError | ClientError | OSError):
        traceback.print_exception(error)
    reply: dict[str, Any] = {"code": code, "error": f"{WORDS[code.partition('.')[0]]} ({code}); its log says more"}
    return reply | ({"forgot": True} if code == "forgot" else {})


def _code(error: Exception) -> str:
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, NotAllowed):
        return "code"
    own = error.__cause__ if isinstance(error, RunError) else error  # a checkpoint's says so in words of its own
    return "disk" if isinstance(own, OSError) and own.errno in (errno.ENOSPC, errno.EDQUOT) else "failed"
