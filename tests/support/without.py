"""What takes most of the time of a small run, or depends on the machine, and few tests look at: pictures, safety from a
power cut, what is measured before a run begins, and a base that was loaded before."""

import base64
import copy
import os
import struct
import sys
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import typer.main
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

from llm_fed.basics import cgroups, files
from llm_fed.commands import compare
from llm_fed.eval import plots
from llm_fed.eval.report import pictures as drawn
from llm_fed.experiment import announce
from llm_fed.models import loading as bases
from llm_fed.settings import plugins

T = TypeVar("T")

PEAK = announce._peak


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_HEADER = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
PIXEL = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", _HEADER) + _chunk(b"IDAT", zlib.compress(b"\0\0")) + _chunk(b"IEND", b"")


def pictures(patch: pytest.MonkeyPatch, *, drawn_first: bool = False) -> None:
    """Reports are written as always, but each picture is one pixel.

    Args:
        drawn_first: whether it is drawn of the run's numbers before that.
    """
    embed, pixel = drawn.embed, "data:image/png;base64," + base64.b64encode(PIXEL).decode()

    def save(figure: Any, path: Any) -> Any:  # replaces a link, as `style.save`
        files.write_file(path, PIXEL) if isinstance(path, Path) else path.write(PIXEL)
        return path

    def embed_pixel(draw: partial[Path]) -> str:
        if drawn_first:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(plots.style, "save", save)
                return embed(draw)
        return pixel

    patch.setattr(drawn, "embed", embed_pixel)
    for name in ("plot_bands", "plot_methods", "plot_tradeoff", "plot_verdict") if not drawn_first else ():
        patch.setattr(compare, name, lambda path, **given: save(None, path))


def parsers(patch: pytest.MonkeyPatch) -> None:
    """The parser of the command line is made once for all commands of this process, as it takes as long as two rounds
    of a small run."""
    patch.setattr(typer.main, "get_command", cache(typer.main.get_command))


def packages(patch: pytest.MonkeyPatch) -> None:
    """What installed packages name is read once for each path on which they are looked for."""
    read = plugins.entry_points
    known = cache(lambda group, path: read(group=group))
    patch.setattr(plugins, "entry_points", lambda *, group: known(group, tuple(sys.path)))


def measures(patch: pytest.MonkeyPatch) -> None:
    """Nothing that a run says depends on this machine's CPU or its load. What the control groups leave is read once
    rather than ten times in a run, and what a step takes is not found out by taking it."""
    patch.setattr(announce, "_peak", lambda *asked: 2**20)
    patch.setattr(cgroups, "group_limits", _once_for_this_machine(cgroups.group_limits))
    patch.setattr(bases, "bfloat16_hint", lambda dtype="auto": "")


def _once_for_this_machine(read: Callable[[Path], list[T]]) -> Callable[[Path], list[T]]:
    """`read`, called once for the machine's own root; other roots are folders of a test. Each list is a new one, which
    its reader may change."""
    own = cache(partial(read, Path("/")))
    return lambda root=Path("/"): [*own()] if root == Path("/") else read(root)


def loading(patch: pytest.MonkeyPatch) -> None:
    """A model that this process has loaded from the same files is copied, which takes a tenth of the time."""
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForImageClassification):
        patch.setattr(kind, "from_pretrained", _loaded_once(kind))


def _loaded_once(kind: Any) -> Callable[..., Any]:
    load, known = kind.from_pretrained, dict[Any, Any]()

    def from_pretrained(folder: Any, **options: Any) -> Any:
        if options.get("quantization_config") is not None or not os.path.isdir(folder):
            return load(folder, **options)
        files = [(entry.name, entry.stat().st_mtime_ns, entry.inode()) for entry in os.scandir(folder)]
        draws = b"" if kind is AutoModelForCausalLM else torch.get_rng_state().numpy().tobytes()  # of a new head
        key = str(folder), tuple(sorted(files)), repr(sorted(options.items())), draws
        if key not in known:
            if len(known) > 3:
                known.clear()
            known[key] = load(folder, **options)
        return copy.deepcopy(known[key])

    return from_pretrained


def disks(patch: pytest.MonkeyPatch) -> None:
    """Nothing waits until the disk has what was written: only a power cut would show it."""
    patch.setattr(os, "fsync", lambda handle: None)
    patch.setattr(files, "_syncfs", lambda handle: 0)
