"""The run and launch files that come with llm_fed: in the scripts folder of a clone, or within an installed package."""

from __future__ import annotations

import difflib
import re
from itertools import takewhile
from pathlib import Path

from llm_fed.basics.errors import UserError

RUNS, LAUNCHES = "scripts/runs", "scripts/launch"
_PACKAGE = Path(__file__).parents[1]


def files(folder: str = RUNS) -> dict[str, Path]:
    """The files of RUNS or LAUNCHES by name."""
    locations = (_PACKAGE / folder, _PACKAGE.parent / folder)
    return {path.name: path for location in locations for path in sorted(location.glob("*.yaml"))}


def find(path: str | Path) -> Path:
    """A configuration file: the one of this path, or else the one of this name, or of RUNS, that llm_fed ships.
    UserError where there is none: which are called much like it."""
    path = Path(path)
    if path.exists():
        return path
    shipped = files()
    if path.name in shipped and path in (Path(path.name), Path(RUNS, path.name)):
        return shipped[path.name]
    if "=" in path.name or "=" in str(path.parent):
        raise UserError(f"{path} is a setting; the configuration file comes first, as in run mine.yaml {path}")
    known = [*(other.name for other in sorted(path.parent.glob("*.y*ml"))), *shipped]
    close = list(dict.fromkeys(difflib.get_close_matches(path.name, known)))
    others = f"; did you mean {' or '.join(close)}?" if close else "; llm-fed runs lists those that llm_fed ships"
    raise UserError(f"there is no configuration file {path}{others}")


def rows() -> list[dict[str, str]]:
    """Every shipped file: its name, what it is for (the beginning of its comment), and where it is."""
    paths = {**files(), **files(LAUNCHES)}
    return [{"name": name, "about": _about(path), "file": str(path)} for name, path in paths.items()]


def _about(path: Path) -> str:
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"[.:;?] ", " ".join(line.lstrip("# ") for line in comment))[0].rstrip(".")
