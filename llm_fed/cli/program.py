"""The program: its commands are registered here, and errors end it with one or two lines and an exit code."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperGroup

from llm_fed.basics import launchers
from llm_fed.basics.errors import RunError, UserError, panics, printable
from llm_fed.basics.terminal import lasting_streams


class _Commands(TyperGroup):
    """The commands, with all of their help: to rich a [bracket] would be a style, and typer 0.20 loses the words about
    arguments with click 8.5."""

    def __init__(self, *, commands: Any = None, **settings: Any):
        for command in (commands or {}).values():
            command.help = escape(" ".join((command.help or "").split()))
            hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
            for parameter in command.params:
                _, about = get_args(hints[parameter.name])
                parameter.help = escape(about.help)
        super().__init__(commands=commands, **settings)


app = typer.Typer(
    name="llm-fed",
    cls=_Commands,
    help="Federated LoRA fine-tuning with personal models by merging.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What is no fault of the program, wherever it comes up: a full or read-only disk, missing rights, a name too long.
_OF_THE_DISK = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
)  # fmt: skip

_INTERRUPTED = "interrupted; give the same command again to continue from the last checkpoint"
UsageError: Any = typer.BadParameter.__base__  # click's, or the one that later versions of typer have of their own


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Exit code 0: done; 2: a mistake in what was given; 1: a failure; 130: interrupted.

    Of several processes under `accelerate launch`, rank 0 runs it; the others work for it and say nothing.
    """
    _set_up()
    with lasting_streams() as output:
        try:
            with _other_ranks(), _exit_codes(sys.argv[1:] if arguments is None else arguments):
                code = app(arguments, prog_name="llm-fed", standalone_mode=False)
                if code == 130:  # typer turns Ctrl-C into this exit code
                    _stop(_INTERRUPTED, 130)
                raise SystemExit(code or 0)
        except SystemExit as ended:
            output.flush()
            if ended.code or output.failure is None or output.reader_left:
                raise
            _stop(f"cannot write to standard output: {output.failure}; files that were written are whole", 1)


def _set_up() -> None:
    """What libraries read when they are imported. Some ask for the user's home, and fail or complain where there is
    none, or none that can be written; nothing that is needed lies there. Their notices and progress bars stay out of
    the output, unless the user has set how much they say."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of missing optional kernels
    if os.path.expanduser("~") == "~":  # neither HOME nor an entry in the list of users, as in a container
        os.environ["HOME"] = "/"
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its cache is then a temporary folder


@contextmanager
def _other_ranks() -> Iterator[None]:
    """At rank 0 of a launch: the others, until it is done. At the others: all that they do, and the end."""
    others: AbstractContextManager[Any] | None = nullcontext()
    try:
        if launchers.process_rank() is not None:
            launchers.check()
            from llm_fed.experiment.run import join_launch  # takes seconds

            others = join_launch()
    except UserError as error:  # each rank says it, as rank 0 may be ended before it could
        _stop(error, 2)
    except (KeyboardInterrupt, RunError) as error:  # rank 0 says what there is to say
        raise SystemExit(1) from error
    if others is None:
        raise SystemExit(0)
    with others:
        yield


@contextmanager
def _exit_codes(arguments: list[str]) -> Iterator[None]:
    """Ends the process with a line and a code for whatever a command raises that is no fault of the program."""
    try:
        with panics("a tokenizer"):
            yield
    except UsageError as error:
        if text := error.format_message():  # without any word, the help has been shown
            text = _instead(text, arguments) or text
            _stop(f"{text}\nSee {error.ctx.command_path if error.ctx else 'llm-fed'} --help", 2)
        raise SystemExit(2) from error
    except UserError as error:
        _stop(error, 2)
    except RunError as error:
        _stop(error, 1)
    except OSError as error:
        if error.filename is None and "temporary" in str(error.strerror):  # as tempfile says it
            _stop(f"{error.strerror}; set TMPDIR to a folder that can be written, then repeat the command", 1)
        if error.errno not in _OF_THE_DISK:
            raise
        where = error.filename or "a file"
        _stop(f"cannot use {where}: {error.strerror}; fix that or give another path, then repeat the command", 1)
    except (KeyboardInterrupt, typer.Abort):
        _stop(_INTERRUPTED, 130)


def _instead(text: str, arguments: list[str]) -> str:
    """What to type instead of an option or a command that there is not, by the words of typer; empty where that is
    not known: a setting as an option, or what other programs have."""
    from llm_fed.settings import configfile, habits
    from llm_fed.settings.config import Config

    if (match := re.match(r"No such (option|command):? '([^']+)'", text)) is None:
        return ""
    what, name = match.groups()
    if what == "command":
        command = habits.COMMANDS.get(name)
        return f"No such command {name!r}; type llm-fed {command}" if command else ""
    rest = " ".join(arguments).partition(name)[2].removeprefix("=").split()
    value = rest[0] if rest and not rest[0].startswith("--") else ""
    key = name.lstrip("-").replace("-", "_")
    if arguments[:1] not in (["run"], ["compare"]):
        return ""
    known = configfile.flat(configfile.as_dict(Config()))
    advice = f"{key}={value or '...'}" if key in known else habits.instead(key, value, known)
    return f"No such option {name!r}; settings have no dashes: type {advice}" if advice else ""


def _stop(message: object, code: int) -> NoReturn:
    print(f"llm-fed: {printable(str(message))}", file=sys.stderr)
    raise SystemExit(code)


def _version(requested: bool) -> None:
    if requested:
        print(f"llm-fed {importlib.metadata.version('llm-fed')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Federated LoRA fine-tuning with personal models by merging."""
    try:
        os.getcwd()
    except FileNotFoundError as error:  # torch would end the process, with words about something else
        raise UserError(
            "the current folder has been deleted; change to another one, then repeat the command"
        ) from error
