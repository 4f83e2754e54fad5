"""Runs one step of a sitting on a GPU (`run.sh` runs them all): each case that results.jsonl lacks, a line for each.

    python scripts/gpu/step.py training --results gpu-results/results.jsonl [--tiny] [--limit 100]

It ends with 0 when every case has its line, with 75 when time ran out before that (the same command goes on), and with
1 when a case failed; such a case is tried again next time. A case during which the process ended comes behind the
others, and the more often the later.
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

from lines import Line, append, read
from steps import STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--results", type=Path, required=True, help="a file; lines are appended")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to try the step itself")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of this step")
    parser.add_argument("--model", type=Path, help="the folder of a chat model")
    parser.add_argument("--commit", default="unknown", help="of the code, as its lines name it")
    sys.exit(run(parser.parse_args()))


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    from setting import Setting, Skipped

    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("step.py: torch sees no GPU here; --tiny tries the steps on the CPU")
    device, card = ("cpu", "CPU") if args.tiny else ("cuda", torch.cuda.get_device_name())
    scratch = args.results.parent / "scratch"
    setting = Setting(torch.device(device), card, args.tiny, scratch, args.model, args.commit)
    step, known = STEPS[args.step], list(read(args.results))
    measures = import_module(f"step_{step.script}").measures(setting)

    def line(case: str, figure: Mapping[str, object]) -> Line:
        head = {"case": case, "tiny": True} if args.tiny else {"case": case}
        return Line(args.step, card, torch.__version__, args.commit, {**head, **figure})

    like = {case: [each for each in known if each.measures_like(line(case, {}))] for case in step.cases}
    lacking = [case for case in step.cases if not any(each.is_measured for each in like[case])]
    longest, failed = 0.0, False
    for case in sorted(lacking, key=lambda case: sum(each.figure.get("begun", 0) for each in like[case])):
        if longest and time.monotonic() - began + longest > args.limit:
            return 75
        start = time.monotonic()
        print(f"begin {case}", flush=True)
        append(args.results, line(case, {"begun": 1}))
        try:
            figure = {**measures(case), **libraries()}
        except Skipped as reason:
            print(f"{case}: skipped, {reason}", flush=True)
            figure = {"begun": -1}
        except Exception as error:
            traceback.print_exc()
            failed, figure = True, {"error": f"{type(error).__name__}: {error}"[:300], "begun": -1}
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
