"""A process that does as it is told, for tests of `llm_fed.runtime.processes`; it imports next to nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from llm_fed.runtime import processes


def answer(order: bytes) -> bytes:
    word, _, rest = order.decode().partition(" ")
    if word == "print":
        print(rest, flush=True)
    elif word == "dies":
        os.kill(os.getpid(), getattr(signal, rest))
    elif word == "exits":
        os._exit(int(rest))
    elif word == "counts":  # in a file, until it is ended
        for number in range(10**6):
            Path(rest).write_text(str(number))
            time.sleep(0.01)
    elif word == "stubborn":
        while True:
            try:
                Path(rest).write_text(str(time.monotonic()))
                time.sleep(0.01)
            except KeyboardInterrupt:
                pass
    elif word == "environment":
        return repr((os.environ.get(rest), sys.path, os.getpid())).encode()
    return order


def main(number: int) -> None:
    print("imports are done", flush=True)
    processes._GRACE = 0.5
    processes.serve(number, answer)
