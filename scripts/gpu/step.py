"""Runs one step of a sitting on a GPU (`run.sh` runs them all): each case that results.jsonl lacks, a line for each.

    python scripts/gpu/step.py training --results gpu-results/results.jsonl [--tiny] [--limit 150]

It ends with 0 when every case has its line, with 75 when time ran out before that (the same command goes on), and with
1 when a case failed; such a case is tried again next time.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from lines import Line, append, read
from steps import STEPS

SCRIPTS = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--results", type=Path, required=True, help="a file; lines are appended")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to try the step itself")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of this step")
    parser.add_argument("--model", type=Path, help="the folder of a chat model, for the step real_base")
    parser.add_argument("--commit", default="unknown", help="of the code, as its lines name it")
    args = parser.parse_args()
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    import torch

    sys.path.insert(0, str(SCRIPTS / "bench"))
    from setting import Skipped, setting_of

    setting = setting_of(tiny=args.tiny, scratch=args.results.parent / "scratch", model=args.model)
    known = list(read(args.results))
    measures = import_module(f"step_{args.step}").measures(setting)
    longest, failed = 0.0, False
    for case in STEPS[args.step].cases:

        def line(figure: dict[str, object], case: str = case) -> Line:
            head = {"case": case, "tiny": True} if args.tiny else {"case": case}
            return Line(args.step, setting.card, torch.__version__, args.commit, {**head, **figure})

        if any(each.is_measured and each.measures_like(line({})) for each in known):
            continue
        if longest and time.monotonic() - began + longest > args.limit:
            return 75
        start = time.monotonic()
        try:
            figure = measures[case]()
        except Skipped as reason:
            print(f"{case}: skipped, {reason}", flush=True)
            continue
        except Exception as error:
            traceback.print_exc()
            failed, figure = True, {"error": f"{type(error).__name__}: {error}"[:300]}
        longest = max(longest, time.monotonic() - start)
        append(args.results, line(figure))
        print(f"{case}: {figure}", flush=True)
    return int(failed)


if __name__ == "__main__":
    main()
