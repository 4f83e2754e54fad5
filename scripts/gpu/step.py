"""Runs one step of a sitting on a GPU (`run.sh` runs them all): each case that results.jsonl lacks, a line for each.

    python scripts/gpu/step.py training --results gpu-results/results.jsonl [--tiny] [--limit 150]

It ends with 0 when every case has its line, with 75 when time ran out before that (the same command goes on), and with
1 when a case failed; such a case is tried again next time. A case during which the process ended comes behind the
others, and the more often the later; `--cut-off leave` leaves such cases out and says so, `only` leaves out the others.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from begun import Begun
from lines import Line, append, read
from steps import STEPS

SCRIPTS = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--results", type=Path, required=True, help="a file; lines are appended")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to try the step itself")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of this step")
    parser.add_argument("--model", type=Path, help="the folder of a chat model, for real_base and comparison")
    parser.add_argument("--cut-off", choices=["last", "leave", "only"], default="last", help="cases that once were")
    parser.add_argument("--commit", default="unknown", help="of the code, as its lines name it")
    args = parser.parse_args()
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    import torch

    sys.path.insert(0, str(SCRIPTS / "bench"))
    from setting import Skipped, setting_of

    scratch = args.results.parent / "scratch"
    setting = setting_of(tiny=args.tiny, scratch=scratch, model=args.model, commit=args.commit)
    known, begun = list(read(args.results)), Begun(args.results.with_name("begun.jsonl"))
    measures = import_module(f"step_{args.step}").measures(setting)

    def line(case: str, figure: Mapping[str, object]) -> Line:
        head = {"case": case, "tiny": True} if args.tiny else {"case": case}
        return Line(args.step, setting.card, torch.__version__, args.commit, {**head, **figure})

    empty = {case: line(case, {}) for case in STEPS[args.step].cases}
    lacking = [case for case in empty if not any(e.is_measured and e.measures_like(empty[case]) for e in known)]
    times = {case: begun.cut_off(empty[case]) for case in lacking}
    longest, failed = 0.0, False
    for case in sorted(lacking, key=lambda case: times[case]):
        if times[case] and args.cut_off == "leave":
            print(f"{case}: cut off before, so it comes after all other steps", flush=True)
            continue
        if not times[case] and args.cut_off == "only":
            continue
        if longest and time.monotonic() - began + longest > args.limit:
            return 75
        start = time.monotonic()
        print(f"begin {case}", flush=True)
        try:
            with begun.noted(empty[case]):
                figure = {**measures[case](), **libraries()}
        except Skipped as reason:
            print(f"{case}: skipped, {reason}", flush=True)
            continue
        except Exception as error:
            traceback.print_exc()
            failed, figure = True, {"error": f"{type(error).__name__}: {error}"[:300]}
        longest = max(longest, time.monotonic() - start)
        append(args.results, line(case, figure))
        print(f"{case}: {figure}", flush=True)
    return int(failed)


def libraries() -> dict[str, str]:
    """What a figure depends on, beside torch. Without Liger only norms are fused."""
    from llm_fed.engine.fused import has_library

    return {"transformers": version("transformers"), "liger": version("liger-kernel") if has_library() else "none"}


if __name__ == "__main__":
    main()
