"""Tries a method by the battery, in a minute, on a CPU, without a download.

    python -m llm_fed.testing my_package.my_module:MyMethod [key=value ...]

The words are settings of the method (momentum=0.5), or of how clients train (local.optimizer=sgd). What comes is a line
for each check: ok, or what was got, what was expected and where it is described. Exit code 0: all passed; 1: some did
not; 2: a mistake in what was given.
"""

from __future__ import annotations

import argparse
import os
import sys

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.settings import configfile
from llm_fed.settings.config import Config


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m llm_fed.testing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", help="package.module:Class, or a name that `llm-fed methods` shows")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="e.g. momentum=0.5 or local.optimizer=sgd")
    parser.add_argument("--bytes-vary", type=float, default=0.0, metavar="SHARE",
                        help="sizes of messages may differ from round to round by this share")  # fmt: skip
    parser.add_argument("--order-tolerance", type=float, default=1e-12, metavar="NUMBER",
                        help="by so much may the server's state depend on the order of uploads")  # fmt: skip
    given = parser.parse_intermixed_args(arguments)
    try:
        local = [word for word in given.settings if word.startswith("local.")]
        words = [f"method.{word.removeprefix('method.')}" for word in given.settings if word not in local]
        settings = configfile.overlay(Config(), [f"method.name={given.method}", *words], "the method").method
        from llm_fed.experiment.run import quiet  # takes seconds, so mistakes are named first
        from llm_fed.testing.battery import Slack, examine

        quiet()
        slack = Slack(given.order_tolerance, given.bytes_vary)
        passed = examine(settings, local, slack, lambda line: print(line, flush=True))
    except UserError as error:
        print(f"llm_fed.testing: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads cost models so small more than they gain
    with lasting_streams():
        sys.exit(main())
