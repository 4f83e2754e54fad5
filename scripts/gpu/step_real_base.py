"""`llm-fed run` as a user starts it, on a real base: what passes before the first round, what a round takes, and the
score."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from setting import Setting, Skipped
from steps import METHODS

import llm_fed
from llm_fed.runs.records import timed_rounds

ASSETS = Path(llm_fed.__file__).parent / "assets"


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    return {method: lambda method=method: measured(setting, method) for method in METHODS}  # type: ignore[misc]


def measured(setting: Setting, method: str) -> dict[str, Any]:
    model, template = base_of(setting)
    out = setting.scratch / f"real_base-{method}"
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [
        str(ASSETS / "quickstart.yaml"), f"base.name={model}", "base.dtype=auto", f"method={method}",
        f"device={setting.device.type}", f"rounds={1 if setting.tiny else 3}",
        f"local.steps={1 if setting.tiny else 10}", "local.lr=1e-3", "local.lr_end=1e-3", "eval.every=0",
        "eval.select=last", "eval.base=false", f"task.template={template}",
        *(["eval.limit=4"] if setting.tiny else []),
    ]  # fmt: skip
    begun = (out / "timing.jsonl").exists  # as soon as the first round begins
    log = setting.scratch / f"real_base-{method}.log"
    (first,), seconds = timed(["run", *words, "--out", str(out)], log, [begun])
    rounds = [float(line["seconds"]) for line in timed_rounds(out)]
    summary = json.loads((out / "summary.json").read_text())
    return {
        "first_round": round(first, 1),
        "round": round(sorted(rounds)[len(rounds) // 2], 2),
        "seconds": round(seconds, 1),
        "score": round(summary["scores"]["mean"], 1),
    }


def base_of(setting: Setting) -> tuple[Path, str]:
    """The folder of a real base, and the template of its prompts.

    Raises:
        Skipped: none is here.
    """
    model = ASSETS / "tiny-base" if setting.tiny else setting.model
    if model is None:
        raise Skipped("no base is here; give its folder as MODEL=FOLDER, or put it beside run.sh as `model`")
    tokenizer = model / "tokenizer_config.json"
    chat = (model / "chat_template.jinja").exists() or "chat_template" in tokenizer.read_text(encoding="utf-8")
    return model.resolve(), "chat" if chat else "alpaca-short"


def timed(
    words: Sequence[str], log: Path, events: Sequence[Callable[[], bool]], *, code: Path | None = None
) -> tuple[list[float], float]:
    """The seconds of an llm-fed command in a process of its own, which looks for nothing on the Hub, and those until
    each of some events (or until its end).

    Args:
        code: a folder from which it may import.

    Raises:
        RuntimeError: it failed.
    """
    paths = [path for path in (str(code or ""), os.environ.get("PYTHONPATH")) if path]
    known = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    began, seen = time.perf_counter(), dict[int, float]()
    with open(log, "wb") as said:
        command = [sys.executable, "-m", "llm_fed.cli", *words]
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=known)
        while process.poll() is None:
            time.sleep(0.02)
            now = time.perf_counter() - began
            seen = {n: now for n, event in enumerate(events) if n not in seen and event()} | seen
    seconds = time.perf_counter() - began
    if process.returncode:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"llm-fed {words[0]} ended with {process.returncode}: {' '.join(tail)}")
    return [seen.get(n, seconds) for n in range(len(events))], seconds
