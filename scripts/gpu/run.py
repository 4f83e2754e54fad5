"""What a GPU has to say about this code, in steps of at most 100 seconds in order of worth.

    python scripts/gpu/run.py [STEP ...] [--tiny] [--out FOLDER] [--model FOLDER] [--evidence FOLDER]
    python scripts/gpu/table.py FOLDER/results.jsonl

Steps: equality families training generation start evidence large (default: all). Each figure is a line of
FOLDER/results.jsonl. The same command goes on where it was stopped; a case during which it was stopped comes last in
its step. --tiny tries the steps with tiny shapes on a CPU. --model: the folder of a chat model; --evidence: the data of
Flan. Exit code 1: something is left to do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steps import ROOT, STEPS

Line = dict[str, Any]  # step, card, torch, commit, and the figure: its case, and what was measured or an error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", default=[])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to try the steps")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of a step")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [step for step in args.steps if step not in STEPS]:
        parser.error(f"there is no step {unknown[0]}; known: {' '.join(STEPS)}")
    args.out = args.out.absolute()  # steps start programs in other folders
    args.out.mkdir(parents=True, exist_ok=True)
    if args.here:
        sys.exit(measured(args.steps[0], args))
    codes = [started(step, args) for step in args.steps or STEPS]
    print(f"figures: {args.out / 'results.jsonl'}")
    sys.exit(int(any(codes)))


def started(step: str, args: argparse.Namespace) -> int:
    """The exit code of a step: in a process of its own, as a failed capture can leave torch unusable, or tiny here."""
    if args.tiny:
        code = measured(step, args)
    else:
        given = [f"--{name}={value}" for name, value in vars(args).items() if name != "steps" and value]
        words = [sys.executable, __file__, step, *(word.removesuffix("=True") for word in given), "--here"]
        process = subprocess.Popen(words, start_new_session=True)
        try:
            code = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what the step has started
            code = process.wait() and 75
    print(f"{step}: {'time is up' if code == 75 else 'not all could be measured' if code else 'done'}", flush=True)
    return code


def measured(step: str, args: argparse.Namespace) -> int:
    """Measure each case that results.jsonl lacks; 75 where time ran out before that, and 1 where a case failed."""
    import torch

    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    import measure

    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("run.py: torch sees no GPU here; --tiny tries the steps on the CPU")
    began, longest, failed = time.monotonic(), 0.0, False
    card, results = "CPU" if args.tiny else torch.cuda.get_device_name(), args.out / "results.jsonl"
    setting = measure.Setting(args.tiny, args.out / "scratch", args.model, args.evidence)
    head = {"step": step, "card": card, "torch": torch.__version__, "commit": commit()}

    def line(case: str, **figure: Any) -> Line:
        return {**head, "figure": {"case": case, **({"tiny": True} if args.tiny else {}), **figure}}

    known = [each for each in read(results) if {**each, "figure": None} == {**head, "figure": None}]
    cases = STEPS[step].tiny if args.tiny else STEPS[step].cases
    lines = {case: [each for each in known if each["figure"]["case"] == case] for case in cases}
    lacking = [case for case, its in lines.items() if not any(is_measured(each) for each in its)]
    for case in sorted(lacking, key=lambda case: len(lines[case])):
        if longest and time.monotonic() - began + longest > 0.9 * args.limit:
            return 75
        start = time.monotonic()
        append(results, line(case, error="it was stopped"))
        try:
            append(results, line(case, **measure.measured(setting, step, case)))
        except measure.Skipped as reason:
            print(f"{case}: skipped, {reason}", flush=True)
        except Exception as error:
            traceback.print_exc()
            failed = True
            append(results, line(case, error=f"{type(error).__name__}: {error}"[:300]))
        longest = max(longest, time.monotonic() - start)
    return int(failed)


def commit() -> str:
    """Of the code; a bundle has it in a file."""
    if (kept := ROOT.parent / "commit").exists():
        return kept.read_text().strip()
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def read(path: Path) -> Iterator[Line]:
    """The lines of a file, none where there is no file. A last line that a stopped process left half-written is not
    one."""
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(text)
        except ValueError:
            continue


def append(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


def is_measured(line: Line) -> bool:
    return "error" not in line["figure"]


if __name__ == "__main__":
    main()
