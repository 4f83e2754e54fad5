"""The frames between the command `llm-fed run` and the first optimizer step of a round, innermost last.

    python scripts/structure/frames.py

The run has two clients, one round and a tiny base. Frames of other packages are left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

import llm_fed
from llm_fed.cli import main as command

PACKAGE = Path(llm_fed.__file__).parent
ROOTS = (PACKAGE, PACKAGE.parent / "tasks", PACKAGE.parent / "eval")


def frames(folder: Path) -> list[traceback.FrameSummary]:
    """Those of this project."""
    (folder / "data").mkdir()
    for client in ("ada", "bob"):
        rows = [json.dumps({"prompt": f"question {i}", "answer": f"answer {i}"}) for i in range(8)]
        (folder / "data" / f"{client}.jsonl").write_text("\n".join(rows))
    config = {
        "rounds": 1, "base": {"name": str(PACKAGE / "assets/tiny-base"), "dtype": "float32"},
        "task": {"name": "files", "path": str(folder / "data")}, "method": {"name": "fedit"},
        "local": {"steps": 1, "batch_size": 2}, "eval": {"every": 0, "limit": 1, "max_new_tokens": 2},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    seen: list[list[traceback.FrameSummary]] = []
    step = torch.optim.AdamW.step

    def first(self: Any, *given: Any, **settings: Any) -> Any:
        if not seen:
            seen.append(traceback.extract_stack()[:-1])
        return step(self, *given, **settings)

    with (
        mock.patch.object(torch.optim.AdamW, "step", first),
        suppress(SystemExit),
    ):
        command(["run", str(folder / "config.yaml"), "--out", str(folder / "run")])
    return [frame for frame in seen[0] if any(Path(frame.filename).is_relative_to(root) for root in ROOTS)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stack = frames(Path(folder))
    for frame in stack:
        print(f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno} {frame.name}")
    print(f"{len(stack)} frames in {len({frame.filename for frame in stack})} files", file=sys.stderr)


if __name__ == "__main__":
    main()
