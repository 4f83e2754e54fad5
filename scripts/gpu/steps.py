"""The steps of a sitting on a GPU, in order of worth: their cases, what their tables show, and the goals.

Neither torch nor llm_fed is imported here: `table.py` runs anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = tuple(
    str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text()
)
LARGE, SMALL = "llama-3.2-3b", "smollm2-135m"
AGAIN = "all replayed"  # the same batches again, until all of them are captured
ALONE = "one client after another"  # ours, captured and fused
AS_MANY = "as many tokens as 100"
DENSE = "one adapter on dense rows"  # as many tokens, captured and fused: the limit
DROPS = "dropout"  # of 0.05
PEFT = "stock PEFT, one client after another"
STOCK = "`generate`, one client after another"
WIDE = "all-linear r=16"
WRITTEN = "as written"  # engine.fast=off
EXPERTS = "bf16 and adapters on experts"
COMPARED, DRAWS = ("local", "fedit", "fedmerge", "potara", "feddpa"), 10
EVIDENCE = ("real_rows 32", "real_rows 8", "real_rows 72", "real_potara 72")  # run file and own rows of a client


@dataclass(frozen=True)
class Step:
    """One part of a sitting.

    Attributes:
        cases: what is measured, in order; each gives one line of results.jsonl.
        columns: keys of a figure that the table shows, and their headings.
        about: what the table's figures are, above it.
        tiny: the cases whose code differs, which are tried with tiny shapes.
    """

    cases: tuple[str, ...]
    columns: dict[str, str]
    about: str
    tiny: tuple[str, ...] = ()


@dataclass(frozen=True)
class Goal:
    """What was to be reached.

    Attributes:
        bound: the least that is wanted, or the most.
        cases: whose figure it is; of two, the first one's over the second one's.
        times: what the second one is multiplied by, where it measured a part.
    """

    what: str
    bound: float
    cases: tuple[str, ...]
    key: str = "seconds"
    least: bool = False
    times: float = 1.0


TRAINED = {
    "seconds": "seconds", "tokens_per_second": "useful tokens/s", "padded_per_useful": "padded / useful",
    "peak_gib": "peak GiB", "reserved_gib": "reserved GiB",
}  # fmt: skip
STEPS = {
    "equality": Step(
        TESTS, {"passed": "passed", "skipped": "skipped"},
        "Tests that hold fused training and answers against the same work client by client, on the GPU.", TESTS[:1],
    ),
    "families": Step(
        (
            *(f"{family}, bf16" for family in ("llama", "mistral", "gemma2", "gemma3_text", "qwen2", "qwen3")),
            *(f"llama, {form}" for form in ("nf4", "int8", "fp32", "activation checkpointing", WIDE, DROPS)),
            *(f"{family}, window" for family in ("qwen3", "mistral", "gemma3_text")), f"mixtral, {EXPERTS}",
        ),
        {
            "seconds": "together, s", "alone_seconds": "one by one, s", "replayed": "replayed",
            "padding_free": "no padding", "apart": "apart", "of_rounding": "of rounding", "peak_gib": "peak GiB",
        },
        "Four clients, three steps of gradient descent, as `auto` computes: together, and each alone as written. "
        "`apart` is their distance as a share of the way that training went, `of rounding` how far they are from "
        "float32, over how far each alone is. Small random models; a `window` is 32 tokens.",
        ("llama, nf4", "gemma3_text, window"),
    ),
    "training": Step(
        (
            f"{LARGE}, 32 clients", f"{SMALL}, 8 clients, 20 steps",
            *(
                f"{base}, 8 clients{how}"
                for base in (LARGE, SMALL)
                for how in ("", f", {PEFT}", f", {DENSE}", f", {ALONE}, {AGAIN}", f", {WRITTEN}")
            ),
            f"{LARGE}, 32 clients, {AGAIN}", f"{SMALL}, 8 clients, 20 steps, {AGAIN}", f"{LARGE}, 8 clients, {AGAIN}",
            f"{SMALL}, 8 clients, {AGAIN}", f"{LARGE}, 8 clients, {DROPS}", f"{LARGE}, 8 clients, nf4",
            f"{LARGE}, 8 clients, int8",
        ),
        TRAINED,
        "Four local steps of batch 4, log-normal lengths around 80 tokens, bfloat16, LoRA r = 8 on q and v. Without a "
        f"word: new examples each round, the mean of five after up to ten. `{AGAIN}`: the same batches until all are "
        "captured, as in no run. `reserved` includes graphs.",
        (f"{LARGE}, 8 clients", *(f"{LARGE}, 8 clients, {how}" for how in (AGAIN, DENSE, DROPS, PEFT, "int8"))),
    ),
    "generation": Step(
        tuple(f"{base}, {who}" for base in (SMALL, LARGE) for who in ("ours", STOCK, WRITTEN)),
        {"answers": "answers", "seconds": "seconds", "tokens_per_second": "new tokens/s", "peak_gib": "peak GiB"},
        "Answers of eight clients, each under its own adapter, of at most 64 tokens; random weights rarely end early.",
        (f"{SMALL}, ours", f"{SMALL}, {STOCK}"),
    ),
    "start": Step(
        ("fedit", "five methods"),
        {"first_round": "start to first round, s", "seconds": "the run or draw, s", "all": f"{DRAWS} draws, s"},
        "`llm-fed run` and `llm-fed compare` as a user starts them, on the base of `--model`: the quickstart's twelve "
        "clients, three rounds of ten steps.", ("fedit",),
    ),
    "evidence": Step(
        EVIDENCE, {"seconds": "seconds", "scores": "mean of each row"},
        "`docs/results/real_rows.md` on the base of `--model`, ten draws; `--evidence` has the data of Flan.",
        EVIDENCE[:1],
    ),
    "large": Step(
        (
            f"{LARGE}, 100 clients", f"{LARGE}, 8 clients, {AS_MANY}, {AGAIN}", f"{LARGE}, 100 clients, {AGAIN}",
            f"llama-3.1-8b, 8 clients, {WIDE}, {AGAIN}",
        ),
        TRAINED, "As training; 320 tokens on 8B.", (f"llama-3.1-8b, 8 clients, {WIDE}, {AGAIN}",),
    ),
}  # fmt: skip


def _speed(name: str, bound: float, case: str) -> Goal:
    return Goal(f"{name}, useful tokens/s", bound, (case,), "tokens_per_second", least=True)


def _over(what: str, bound: float, case: str, other: str, key: str = "seconds") -> Goal:
    return Goal(what, bound, (case, other), key)


def _quicker(name: str, bound: float, base: str) -> Goal:
    what = f"{name}, 8 clients, times as quick as stock PEFT, one after another"
    return Goal(what, bound, (f"{base}, 8 clients, {PEFT}", f"{base}, 8 clients"), least=True)


_EIGHT, _AFTER = f"{LARGE}, 8 clients", "8 clients, seconds over those of one after another, captured and fused"
GOALS = (
    _speed("3B, 8 clients", 30_000, _EIGHT),
    _over("3B, 8 clients, seconds over those of one adapter on as many tokens in dense rows", 1.3, _EIGHT,
          f"{_EIGHT}, {DENSE}"),
    *(_speed(f"3B, {n} clients", 38_000, f"{LARGE}, {n} clients") for n in (32, 100)),
    Goal("135M, 8 clients, 20 steps, seconds", 0.3, (f"{SMALL}, 8 clients, 20 steps",)),
    _quicker("3B", 9, LARGE), _quicker("135M", 20, SMALL),
    *(_over(f"{name}, {_AFTER}", 0.85, f"{base}, 8 clients", f"{base}, 8 clients, {ALONE}")
      for name, base in (("3B", LARGE), ("135M", SMALL))),
    _over("3B, seconds of 100 clients over those of 8 with as many tokens", 1.1, f"{LARGE}, 100 clients",
          f"{_EIGHT}, {AS_MANY}"),
    _over("3B, 8 clients, memory over that of one adapter on as many tokens, with graphs and pools", 1.1, _EIGHT,
          f"{_EIGHT}, {DENSE}", "reserved_gib"),
    _speed("8B, all-linear r = 16", 13_000, f"llama-3.1-8b, 8 clients, {WIDE}"),
    Goal("135M, 1,040 answers, seconds", 2.5, (f"{SMALL}, ours",)),
    Goal("135M, times as quick as `generate`, one client (130 answers) after another", 4,
         (f"{SMALL}, {STOCK}", f"{SMALL}, ours"), least=True, times=1 / 8),
    Goal("135M, seconds from start to first round, a local base", 8, ("fedit",), "first_round"),
    Goal("135M, five methods by ten draws, seconds: the start, and ten times one draw", 600, ("five methods",), "all"),
)  # fmt: skip
