"""The tests marked `gpu`, on the GPU; with tiny shapes those of them that a CPU can run as well. A test that passed
before the step was stopped does not run again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from setting import Setting

ROOT = Path(__file__).resolve().parents[2]
PASSED = re.compile(r"^(tests/\S+?::.+?) PASSED", re.MULTILINE)


def measures(setting: Setting) -> Callable[[str], dict[str, Any]]:
    return lambda case: tests(setting)


def tests(setting: Setting) -> dict[str, Any]:
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    chosen = [str(ROOT / "tests/engine/test_on_device.py"), "-m", "not gpu"] if setting.tiny else [*files, "-m", "gpu"]
    log, head = setting.scratch / "equality.log", f"{setting.commit}, {setting.card}, torch {torch.__version__}\n"
    said = log.read_text(errors="replace") if log.exists() else ""
    if not said.startswith(head):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(head)
        said = head
    before = sorted(set(PASSED.findall(said)))
    words = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", *chosen]
    words += [word for name in before for word in ("--deselect", name)]
    with log.open("ab") as file:
        subprocess.run(words, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    last = "".join(log.read_text(errors="replace").strip().splitlines()[-1:])
    counted = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    passed = len(before) + counted.get("passed", 0)
    if counted.keys() & {"failed", "error"} or not passed:
        raise RuntimeError(f"{last} (see {log})")
    return {"passed": passed, "skipped": counted.get("skipped", 0)}
