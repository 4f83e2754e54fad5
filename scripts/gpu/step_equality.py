"""The tests marked `gpu`, on the GPU; with tiny shapes those of them that a CPU can run as well."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from setting import Setting

ROOT = Path(__file__).resolve().parents[2]


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    return {"tests": lambda: tests(setting)}


def tests(setting: Setting) -> dict[str, Any]:
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    chosen = [str(ROOT / "tests/engine/test_on_device.py"), "-m", "not gpu"] if setting.tiny else [*files, "-m", "gpu"]
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    said: list[str] = []

    def run() -> None:
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        said.append(ended.stdout + ended.stderr)

    seconds = setting.once(run)
    counted = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", said[-1])}
    setting.scratch.mkdir(parents=True, exist_ok=True)
    (setting.scratch / "equality.log").write_text(said[-1])
    if counted.keys() & {"failed", "error"} or not counted.get("passed"):
        last = said[-1].strip().splitlines()[-1:]
        raise RuntimeError(f"{' '.join(last)} (see {setting.scratch / 'equality.log'})")
    return {**{what: counted.get(what, 0) for what in ("passed", "skipped")}, "seconds": round(seconds, 1)}
