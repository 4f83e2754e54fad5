"""Counts the files of llm_fed that a training example passes on its way to a gradient, and an upload on its way to the
server's step.

    python scripts/structure/journey.py

A file counts where one of its functions is called with the thing, alone or in a list, tuple or dict. What is followed
is a run of two clients and two rounds on random models: its encoded examples, and the uploads of `ifca`, which no other
message looks like.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from llm_fed.basics.terminal import lasting_streams
from llm_fed.cli import main as llm_fed

CONFIG = """
rounds: 2
base: {name: TINY, dtype: float32}
adapter: {rank: 2, target_modules: [q_proj]}
task: {name: flan, path: DATA, validation: 0}
method: {name: ifca, num_models: 2, warmup_rounds: 1}
local: {steps: 1, batch_size: 2}
eval: {every: 0, limit: 1, max_new_tokens: 2}
"""


def is_example(thing: Any) -> bool:
    return type(thing).__name__ == "Encoded"


def is_upload(thing: Any) -> bool:
    if isinstance(thing, bytes):
        return b'"delta' in thing or b'\\"delta' in thing
    return type(thing).__name__ == "Upload" or (isinstance(thing, dict) and set(thing) == {"model", "delta"})


def holds(value: Any, wanted: Callable[[Any], bool], depth: int = 3) -> bool:
    if wanted(value):
        return True
    if depth and isinstance(value, list | tuple):
        return any(holds(item, wanted, depth - 1) for item in value[:3])
    if depth and isinstance(value, dict):
        return any(holds(item, wanted, depth - 1) for item in list(value.values())[:3])
    return False


def main() -> None:
    followed = {"example": is_example, "upload": is_upload}
    passed: dict[str, dict[str, None]] = {name: {} for name in followed}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not any(f"/{part}/" in file for part in ("llm_fed", "tasks", "eval")):
            return
        if "site-packages" in file or "scripts" in file:
            return
        short = "/".join(Path(file).parts[-2:])
        values = list(frame.f_locals.values())
        for name, wanted in followed.items():
            if short not in passed[name] and any(holds(value, wanted) for value in values):
                passed[name][short] = None

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for client in ("ada", "bob"):
            (folder / "data" / client).mkdir(parents=True)
            lines = [{"instruction": f"say w{n}", "output": f"w{n}"} for n in range(6)]
            for split in ("train", "test"):
                text = "\n".join(map(json.dumps, lines))
                (folder / "data" / client / f"{split}.jsonl").write_text(text)
        base = Path(__file__).parents[2] / "llm_fed" / "assets"
        tiny = next(path.parent for path in base.rglob("config.json"))
        text = CONFIG.replace("TINY", str(tiny)).replace("DATA", str(folder / "data"))
        (folder / "run.yaml").write_text(text)
        sys.argv = ["llm-fed", "run", str(folder / "run.yaml"), "--out", str(folder / "run")]
        sys.setprofile(watch)
        try:
            llm_fed()
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)
    for name, files in passed.items():
        print(f"{name}: {len(files)} files: {', '.join(files)}")


if __name__ == "__main__":
    with lasting_streams():
        main()
