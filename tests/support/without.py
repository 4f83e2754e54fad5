"""What takes most of the time of a small run, or depends on the machine, and few tests look at: pictures, safety from a
power cut, and what is timed before a run begins."""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any

import pytest
from matplotlib.figure import Figure

from llm_fed.basics import files
from llm_fed.eval import plots
from llm_fed.eval.report import pictures as drawn
from llm_fed.experiment import timing
from llm_fed.models import speed


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_HEADER = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
PIXEL = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", _HEADER) + _chunk(b"IDAT", zlib.compress(b"\0\0")) + _chunk(b"IEND", b"")


def pictures(patch: pytest.MonkeyPatch) -> None:
    """Reports are written as always, with figures made of the run's numbers, but each figure is saved as one pixel."""
    embed = drawn.embed

    def save(figure: Figure, path: Any) -> Any:
        path.write(PIXEL)  # a file in memory
        return path

    def embed_pixel(*args: object) -> str:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(plots, "save", save)
            return embed(*args)

    patch.setattr(drawn, "embed", embed_pixel)


def measures(patch: pytest.MonkeyPatch) -> None:
    """No run times its steps before it begins, or compares dtypes: how many steps a process takes is known."""
    patch.setattr(timing, "with_forecast", lambda experiment, plan, reached=0: plan)
    patch.setattr(speed, "hint", lambda: "")


def disks(patch: pytest.MonkeyPatch) -> None:
    """Nothing waits until the disk has what was written: only a power cut would show it."""
    patch.setattr(os, "fsync", lambda handle: None)
    patch.setattr(files, "_syncfs", lambda handle: 0)
