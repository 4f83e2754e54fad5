"""Errors that llm_fed raises on purpose; the command line prints them without a traceback."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from llm_fed.basics.names import same_name

Item = TypeVar("Item")

# Control characters but the tab and the end of a line, signs that turn the direction of text around, half characters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(Exception):
    """A mistake in the configuration, data or paths: what was given, where, and what to do. Exit code 2."""


class RunError(Exception):
    """A run that cannot continue (disk full, all checkpoints damaged, no client left). Exit code 1."""


class ClientError(Exception):
    """One client's work failed (non-finite loss, no usable example); the round goes on without it."""


@contextmanager
def panics(what: str) -> Iterator[None]:
    """Within it, and in what it decorates, a panic of Rust's, as of a tokenizer whose pattern is none, is a UserError.
    It is no Exception, so that nothing else catches it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what} fails, as its tokenizer.json cannot be used: {one_line(str(error))}") from error


def no_locks(error: BaseException | None) -> str:
    """Why a library of Hugging Face fails, and what to do, if its cache's disk has no locks; else empty."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            where = f" ({error.filename})" if error.filename else ""
            return f"the disk of the cache{where} has no locks; set HF_HOME to a folder on another disk"
        error = error.__cause__ or error.__context__
    return ""


def one_line(text: str, most: int = 300) -> str:
    """What another party may have written, as one printable line of at most so many characters."""
    words = " ".join(text[: 4 * most].split())
    return "".join(char if char.isprintable() else "?" for char in words)[:most]


def printable(text: str) -> str:
    """Text for a terminal, where what others wrote must not move the cursor, change colours or turn lines around."""
    return _CONTROLS.sub("?", text)


def listed(names: Sequence[str], most: int = 20, sep: str = ", ") -> str:
    """Names in a message, `ada, bob`; of many the first, and how many more there are."""
    most = most + 1 if len(names) == most + 1 else most  # its name is no longer than "and 1 more"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return sep.join(names[:most]) + more


def install(extra: str) -> str:
    """How to install an optional dependency; llm_fed itself is not on a package index."""
    return f"in a clone of llm_fed, run pip install -e '.[{extra}]'; with its wheel, pip install 'WHEEL[{extra}]'"


def lookup(key: str, name: str, table: Mapping[str, Item]) -> Item:
    """`table[name]`; for an unknown name a UserError with the closest valid name and all valid names."""
    return table[require(key, name, table)]


def require(key: str, name: str, valid: Collection[str]) -> str:
    """The valid name that equals `name`, whichever form of Unicode it is in; for an unknown one a UserError with the
    closest valid name and all valid names."""
    valid_name = same_name(name, valid)
    if valid_name is None:
        raise UserError(f"{key}={name!r} is unknown{did_you_mean(name, valid)}; known: {', '.join(valid)}")
    return valid_name


def did_you_mean(name: str, valid: Collection[str]) -> str:
    """ " (the closest is 'x')" for a mistyped name, upper and lower case alike; nothing where no name is close."""
    close = closest(name, valid)
    return f" (the closest is {close!r})" if close else ""


def closest(name: str, valid: Collection[str]) -> str | None:
    """The valid name that `name` is most likely a slip of, of equally likely ones that with the longest common
    beginning; None where none is alike."""
    form, by_form = str(name).casefold(), {item.casefold(): item for item in valid}

    def likeness(item: str) -> tuple[float, int]:
        return difflib.SequenceMatcher(None, item, form).ratio(), len(os.path.commonprefix([item, form]))

    close = difflib.get_close_matches(form, by_form, n=max(1, len(by_form)))
    return by_form[max(close, key=likeness)] if close else None


def refuse(reasons: Mapping[str, bool], where: str = "") -> None:
    """UserError: the first of these reasons that holds, after `where`."""
    for reason, holds in reasons.items():
        if holds:
            raise UserError(where + reason)


def inert(key: str, value: object, beside: str) -> UserError:
    """The error of a setting that would change nothing, as it counts only beside others."""
    name = key.rpartition(".")[2]
    return UserError(
        f"{key}={value} would change nothing, since it counts only with {beside}; set that, or leave {name} out"
    )
