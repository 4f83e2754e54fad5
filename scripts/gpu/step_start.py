"""`llm-fed` as a user starts it, on a real base: what passes before the first round, what a draw of five methods takes,
and the rows of the evidence, which each call continues."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from setting import Setting, Skipped
from steps import COMPARED, DRAWS

import llm_fed

ASSETS = Path(llm_fed.__file__).parent / "assets"
DEFAULT = Path(__file__).resolve().parents[1] / "default"


def measures(setting: Setting) -> Callable[[str], dict[str, Any]]:
    cases = {"fedit": start, "five methods": methods}
    return lambda case: cases[case](setting) if case in cases else evidence(setting, *case.split())


def words_of(setting: Setting) -> list[str]:
    """The quickstart on the base, with few and short rounds.

    Raises:
        Skipped: there is no base here.
    """
    model = ASSETS / "tiny-base" if setting.tiny else setting.model
    if model is None:
        raise Skipped("no base is here; give its folder as MODEL=FOLDER, or put it beside run.sh as `model`")
    chat = (model / "chat_template.jinja").exists() or "chat_template" in (model / "tokenizer_config.json").read_text()
    sizes = ("rounds=1", "local.steps=1", "eval.limit=4") if setting.tiny else ("rounds=3", "local.steps=10")
    return [
        str(ASSETS / "quickstart.yaml"), f"base.name={model.resolve()}", "base.dtype=auto", *sizes, "local.lr=1e-3",
        "local.lr_end=1e-3", "eval.every=0", "eval.select=last", "eval.base=false",
        f"task.template={'chat' if chat else 'alpaca-short'}", f"device={setting.device.type}",
    ]  # fmt: skip


def start(setting: Setting) -> dict[str, Any]:
    out = emptied(setting.scratch / "start")
    words = ["run", *words_of(setting), "method=fedit", "--out", str(out)]
    first, seconds = timed(words, out, (out / "timing.jsonl").exists)
    return {"first_round": round(first, 1), "seconds": round(seconds, 1)}


def methods(setting: Setting) -> dict[str, Any]:
    out, rows = emptied(setting.scratch / "methods"), COMPARED[:2] if setting.tiny else COMPARED
    words = ["compare", *words_of(setting), "--methods", ",".join(rows), "--draws", "1", "--out", str(out)]
    first, seconds = timed(words, out, lambda: any(out.glob("*/timing.jsonl")))
    draw = seconds - first
    return {"first_round": round(first, 1), "seconds": round(draw, 1), "all": round(first + DRAWS * draw)}


def evidence(setting: Setting, study: str, rows: str) -> dict[str, Any]:
    """Ten draws; the step goes on with them where it was stopped.

    Raises:
        Skipped: there is no base or no data here.
    """
    data = os.environ.get("EVIDENCE")
    if setting.model is None or data is None:
        raise Skipped("it needs MODEL=FOLDER and EVIDENCE=FOLDER, the data of Flan")
    folder = setting.scratch / f"{study}-{rows}"
    known = {**os.environ, "LLM_FED_DATA": data}
    seconds, scores = 0.0, dict[str, list[float]]()
    for draw in range(1 if setting.tiny else DRAWS):
        task, out = folder / f"data{draw}", folder / f"draw{draw}"
        if not task.exists():
            script = [sys.executable, str(DEFAULT / "real_rows.py"), "tasks", str(task)]
            subprocess.run([*script, "--rows", rows, "--seed", str(draw)], check=True, env=known)
        words = ["compare", f"{study}.yaml", f"base.name={setting.model.resolve()}", f"task.path={task}"]
        words += [f"rounds={16 if rows == '72' else 8}", f"device={setting.device.type}", "--seeds", str(draw)]
        seconds += timed([*words, "--out", str(out)], out, out.exists)[1]
        for row in json.loads((out / "table.json").read_text())["rows"]:
            scores.setdefault(row["label"], []).append(row["seeds"][str(draw)]["average"])
    return {"seconds": round(seconds), "scores": {row: [round(each, 1) for each in its] for row, its in scores.items()}}


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def timed(words: Sequence[str], out: Path, event: Callable[[], bool]) -> tuple[float, float]:
    """The seconds of an llm-fed command in a process of its own until an event (or its end), and until its end.

    Raises:
        RuntimeError: it failed.
    """
    log = out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    began, first = time.perf_counter(), 0.0
    with open(log, "wb") as said:
        process = subprocess.Popen([sys.executable, "-m", "llm_fed.cli", *words], stdout=said, stderr=said)
        while process.poll() is None:
            time.sleep(0.02)
            if not first and event():
                first = time.perf_counter() - began
    seconds = time.perf_counter() - began
    if process.returncode:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"llm-fed {words[0]} ended with {process.returncode}: {' '.join(tail)}")
    return first or seconds, seconds
