"""What a GPU has to say about this code, in steps of at most 100 seconds in order of worth.

    python scripts/gpu/run.py [STEP ...] [--tiny] [--out FOLDER]
    python scripts/gpu/table.py FOLDER/results.jsonl

Steps: equality training generation start evidence large serve (default: all). Each figure is a line of
FOLDER/results.jsonl. The same command goes on where it was stopped; a case during which it was stopped comes last in
its step. `evidence` takes a real base and its data, BASE=FOLDER and LLM_FED_DATA=FOLDER, and adds clients' scores to
FOLDER/rows. --tiny tries the steps with tiny shapes on a CPU. Exit code 1: something is left to do.
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
from typing import TypedDict

from steps import ROOT, STEPS

Figure = dict[str, float | str]


class Line(TypedDict):
    """A figure, and where it was measured: its case, and what was measured or an error."""

    step: str
    card: str
    torch: str
    commit: str
    figure: Figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", default=[])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to try the steps")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of a step")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [step for step in args.steps if step not in STEPS]:
        parser.error(f"there is no step {unknown[0]}; known: {' '.join(STEPS)}")
    args.out = args.out.absolute()  # steps start programs in other folders
    args.out.mkdir(parents=True, exist_ok=True)
    if args.here:
        sys.exit(measured(args.steps[0], args.out, args.tiny, args.limit))
    wanted = args.steps or [step for step in STEPS if step != "evidence" or args.tiny or "BASE" in os.environ]
    codes = [started(step, args.out, args.tiny, args.limit) for step in wanted]
    if len(wanted) < len(args.steps or STEPS):
        print("evidence: left out, as BASE names no base")
    print(f"figures: {args.out / 'results.jsonl'}")
    sys.exit(int(any(codes)))


def started(step: str, out: Path, tiny: bool, limit: float) -> int:
    """The exit code of a step: in a process of its own, as a failed capture can leave torch unusable, or tiny here."""
    if tiny:
        code = measured(step, out, tiny, limit)
    else:
        words = [sys.executable, __file__, step, "--here", "--out", str(out), "--limit", str(limit)]
        process = subprocess.Popen(words, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what the step has started
            code = process.wait() and 75
    print(f"{step}: {'time is up' if code == 75 else 'not all could be measured' if code else 'done'}", flush=True)
    return code


def measured(step: str, out: Path, tiny: bool, limit: float) -> int:
    """Measure each case that results.jsonl lacks; 75 where time ran out before that, and 1 where a case failed."""
    import torch

    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    import measure

    if not tiny and not torch.cuda.is_available():
        raise SystemExit("run.py: torch sees no GPU here; --tiny tries the steps on the CPU")
    card, results = "CPU" if tiny else torch.cuda.get_device_name(), out / "results.jsonl"
    setting = measure.Setting(tiny, out / "scratch")

    def line(case: str, figure: Figure) -> Line:
        known: Figure = {"case": case, "tiny": True} if tiny else {"case": case}
        return Line(step=step, card=card, torch=torch.__version__, commit=commit(), figure=known | figure)

    known = [each for each in read(results) if each == {**line("", {}), "figure": each["figure"]}]
    cases = STEPS[step].tiny if tiny else STEPS[step].cases
    lines = {case: [each for each in known if each["figure"]["case"] == case] for case in cases}
    lacking = [case for case, its in lines.items() if not any(map(is_measured, its))]
    began, longest, failed = time.monotonic(), 0.0, False
    for case in sorted(lacking, key=lambda case: len(lines[case])):
        start = time.monotonic()
        if longest and start - began + longest > 0.9 * limit:
            return 75
        append(results, line(case, {"error": "it was stopped"}))
        try:
            append(results, line(case, measure.measured(setting, step, case)))
        except Exception as error:
            traceback.print_exc()
            failed = True
            append(results, line(case, {"error": f"{type(error).__name__}: {error}"[:300]}))
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
