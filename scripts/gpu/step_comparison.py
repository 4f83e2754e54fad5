"""`llm-fed compare` as a user starts it, on a real base: what passes before the first round, and what a draw takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from setting import Setting
from step_real_base import base_of, timed
from steps import COMPARED, DRAWS, STEPS


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    return {case: lambda case=case: measured(setting, case) for case in STEPS["comparison"].cases}  # type: ignore[misc]


def measured(setting: Setting, case: str) -> dict[str, Any]:
    model, template = base_of(setting)
    folder = setting.scratch / "comparison"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = COMPARED[:2] if setting.tiny else COMPARED
    config, out = folder / "comparison.yaml", folder / "out"
    config.write_text("compare:\n  rows:\n" + "".join(f"    {row}: [method={row}]\n" for row in rows))
    words = [
        f"base.name={model}", f"device={setting.device.type}", f"task.name=places:{'TINY' if setting.tiny else 'FULL'}",
        f"task.template={template}", f"task.max_length={96 if setting.tiny else 512}", "local.batch_size=4",
        "local.lr=1e-3", f"rounds={1 if setting.tiny else 10}", f"local.steps={1 if setting.tiny else 20}",
        f"eval.max_new_tokens={2 if setting.tiny else 64}", "--draws", "1", "--out", str(out),
    ]  # fmt: skip
    events = [
        lambda: any(out.glob("*/timing.jsonl")),  # as soon as the first round begins
        lambda: len(list(out.glob("*/summary.json"))) == len(rows),
    ]
    words = ["compare", str(config), *words]
    (begun, last), _ = timed(words, folder / "comparison.log", events, code=Path(__file__).parent)
    draw = last - begun
    return {"first_round": round(begun, 1), "draw": round(draw, 1), "all": round(begun + DRAWS * draw)}
