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
LARGE, SMALL, HUGE = "llama-3.2-3b", "smollm2-135m", "llama-3.1-8b"
AGAIN = "all replayed"  # of earlier sittings: the same batches again, until all of them are captured
ALONE = "one client after another"  # ours, captured and fused
AS_MANY = "as many tokens as 100"
DENSE = "one adapter on dense rows"  # as many tokens, captured and fused: the limit
DROPS = "dropout"  # of 0.05
PEFT = "stock PEFT, one client after another"
STOCK = "`generate`, one client after another"
WIDE = "all-linear r=16"
WRITTEN = "as written"  # engine.fast=off
COMPARED, DRAWS = ("local", "fedit", "fedmerge", "potara", "feddpa"), 10
RATES = ("3e-3", "1e-3", "1e-2")  # the first one in all draws, the others in the first draw
TABLE = ("pooled", "local", "fedit", "fedlora", "fedmerge d=8", "fedem d=8", "ifca d=8", "fedalt")  # rows of Table 3
EIGHT, TWENTY = f"{LARGE}, 8 clients", f"{SMALL}, 8 clients, 20 steps"


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
    tiny: tuple[str, ...]


@dataclass(frozen=True)
class Goal:
    """What was to be reached: at least, or at most, the bound.

    Attributes:
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
VARIANTS = ("", f", {PEFT}", f", {DENSE}", f", {ALONE}", f", {WRITTEN}")
STEPS = {
    "equality": Step(
        TESTS, {"passed": "passed", "skipped": "skipped"},
        "Tests that hold fused training and answers against the same work client by client, on the GPU.", TESTS[:1],
    ),
    "training": Step(
        (
            f"{LARGE}, 32 clients", TWENTY,
            *(f"{base}, 8 clients{variant}" for base in (LARGE, SMALL) for variant in VARIANTS),
            f"{EIGHT}, {DROPS}",
        ),
        TRAINED,
        "Four local steps of batch 4, log-normal lengths around 80 tokens, bfloat16, LoRA r = 8 on q and v. Without a "
        f"word: new examples each round, the mean of five after up to ten. `{AGAIN}`: the same batches until all are "
        "captured, as in no run. `reserved` includes graphs.",
        (EIGHT, *(f"{EIGHT}, {variant}" for variant in (ALONE, DENSE, DROPS, PEFT, WRITTEN))),
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
        "`llm-fed run` and `llm-fed compare` as a user starts them: the quickstart's twelve clients, three rounds of "
        "ten steps, on random weights of 135M.",
        ("fedit",),
    ),
    "evidence": Step(
        (
            *(f"real_rows {own} {draw}" for draw in range(DRAWS) for own in (8, 32, 72)),
            *(f"flan 300 {draw}: {row} lr={rate}" for draw in range(DRAWS) for rate in RATES[: None if draw == 0 else 1]
              for row in TABLE),
            *(f"rolebench 50 {draw}: {row} lr={RATES[0]}" for draw in range(3) for row in TABLE),
            *(f"contradictions 16 {draw}" for draw in range(DRAWS)), *(f"shared_facts 32 {draw}" for draw in range(3)),
        ),
        {"seconds": "seconds"} | {row: row for row in ("base", "rule", "local", "fedit", "fedmerge", "pooled")},
        "Mean test scores on the real base of $BASE, by question, own rows and draw; clients' scores lie in `rows`.",
        ("shared_facts 32 0",),
    ),
    "large": Step(
        (f"{LARGE}, 100 clients", f"{EIGHT}, {AS_MANY}", f"{HUGE}, 8 clients, {WIDE}"),
        TRAINED, "As training; 320 tokens on 8B.", (f"{HUGE}, 8 clients, {WIDE}",),
    ),
    "serve": Step(
        tuple(f"{count} chats at once" for count in (1, 50, 100)),
        {"answers": "answers", "seconds": "seconds", "tokens_per_second": "new tokens/s"},
        "Chats over HTTP with the twelve clients of the run of `start`, in `llm-fed serve`, of at most 64 tokens each.",
        ("50 chats at once",),
    ),
}  # fmt: skip

AFTER = "8 clients, seconds over those of one after another, captured and fused"
QUICKER = "8 clients, times as quick as stock PEFT, one after another"
SPEED, BOTH = "tokens_per_second", ((LARGE, "3B"), (SMALL, "135M"))
GOALS = (
    Goal("3B, 8 clients, useful tokens/s", 30_000, (EIGHT,), SPEED, least=True),
    Goal("3B, 8 clients, seconds over those of one adapter on as many tokens in dense rows", 1.3,
         (EIGHT, f"{EIGHT}, {DENSE}")),
    *(Goal(f"3B, {n} clients, useful tokens/s", 38_000, (f"{LARGE}, {n} clients",), SPEED, True) for n in (32, 100)),
    Goal("135M, 8 clients, 20 steps, seconds", 0.3, (TWENTY,)),
    *(Goal(f"{name}, {QUICKER}", bound, (f"{base}, 8 clients, {PEFT}", f"{base}, 8 clients"), least=True)
      for (base, name), bound in zip(BOTH, (9, 20), strict=True)),
    *(Goal(f"{name}, {AFTER}", 0.85, (f"{base}, 8 clients", f"{base}, 8 clients, {ALONE}")) for base, name in BOTH),
    Goal("3B, seconds of 100 clients over those of 8 with as many tokens", 1.1,
         (f"{LARGE}, 100 clients", f"{EIGHT}, {AS_MANY}")),
    Goal("3B, 8 clients, memory over that of one adapter on as many tokens, with graphs and pools", 1.1,
         (EIGHT, f"{EIGHT}, {DENSE}"), "reserved_gib"),
    Goal("8B, all-linear r = 16, useful tokens/s", 13_000, (f"{HUGE}, 8 clients, {WIDE}",), SPEED, least=True),
    Goal("135M, 1,040 answers, seconds", 2.5, (f"{SMALL}, ours",)),
    Goal("135M, times as quick as `generate`, one client (130 answers) after another", 4,
         (f"{SMALL}, {STOCK}", f"{SMALL}, ours"), least=True, times=1 / 8),
    Goal("135M, seconds from start to first round, a local base", 8, ("fedit",), "first_round"),
    Goal("135M, five methods by ten draws, seconds: the start, and ten times one draw", 600, ("five methods",), "all"),
)  # fmt: skip
