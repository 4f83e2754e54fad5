"""The steps of a sitting on a GPU, in order of worth, and the rows and columns of each one's table.

Neither torch nor llm_fed is imported here: `table.py` runs anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE, SMALL = "llama-3.2-3b", "smollm2-135m"
CLIENTS = (8, 32, 100)
PEFT, FLOOR = "stock PEFT, one client after another", "one adapter for all"
ANSWERING = (
    "ours", "ours, prompts without padding", "ours, as written", "ours, in batches",
    "`generate`, one client after another",
)  # fmt: skip
WRITTEN = "as written"  # engine.{capture,padding_free,fused}=off
ROWS = "in rows"  # engine.padding_free=off
PLAIN = "not fused"  # engine.fused=off
ALONE = "one client after another"  # ours, captured and fused
DENSE = "one adapter on dense rows"  # as many tokens, captured and fused: the limit
WIDE = "all-linear r=16"
DROPS = "dropout"  # of 0.05
AS_MANY = "as many tokens as 100"
AGAIN = "all replayed"  # the same batches again, until all of them are captured
COLD = "20 steps, cold"  # of an engine that has captured nothing
WAYS = tuple(
    ", ".join(filter(None, (flat, fused, captured))) or WRITTEN
    for flat in ("", "no padding") for fused in ("", "fused") for captured in ("", "captured")
)  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
FORMS = ("bf16", "fp32", "nf4", "int8", "activation checkpointing", "all-linear r=16", "device_map=auto")
EXPERTS = "bf16 and adapters on experts"
WINDOWED = tuple(f"{family}, window" for family in ("qwen3", "mistral", "gemma3_text"))
METHODS = ("local", "fedit", "fedmerge")
COMPARED, DRAWS = ("local", "fedit", "fedmerge", "potara", "feddpa"), 10

REPLAYED = tuple(f"{how}, {AGAIN}" for how in (PLAIN, ROWS, ALONE, AS_MANY, DROPS))
TRAINING = (
    "products",
    *(
        f"{base}, {row}"
        for base in (LARGE, SMALL)
        for row in (
            "8 clients", f"8 clients, {COLD}", f"8 clients, {AGAIN}", "32 clients", "100 clients",
            *(("8 clients, 20 steps", f"8 clients, 20 steps, {WRITTEN}") if base == SMALL else ()),
            *(f"8 clients, {how}" for how in (WRITTEN, DENSE, PEFT, FLOOR, *REPLAYED)),
        )
    ),
    *(f"llama-3.1-8b, 8 clients, {how}, {AGAIN}" for how in (WIDE, f"{WIDE}, {DROPS}")),
    f"{LARGE}, 1 client, {WRITTEN}", f"{LARGE}, 32 clients, {WRITTEN}", f"{LARGE}, 100 clients, {WRITTEN}",
    f"{LARGE}, 32 clients, {AGAIN}",
    f"{SMALL}, 8 clients, 20 steps, {AGAIN}",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One part of a sitting.

    Attributes:
        cases: what is measured, in order; each gives one line of results.jsonl.
        columns: keys of a figure that the table shows, and their headings.
        about: what the table's figures are, above it.
    """

    cases: tuple[str, ...]
    columns: dict[str, str]
    about: str


TRAINED = {
    "seconds": "seconds",
    "tokens_per_second": "useful tokens/s",
    "tflops": "TFLOP/s",
    "padded_per_useful": "padded / useful",
    "micro_batches": "micro-batches",
    "replayed": "replayed",
    "warm_up": "rounds before",
    "peak_gib": "peak GiB",
    "reserved_gib": "reserved GiB",
}
STEPS = {
    "equality": Step(
        ("tests",),
        {"passed": "passed", "skipped": "skipped", "seconds": "seconds"},
        "Tests that hold fused training and answers against the same work client by client, on the GPU.",
    ),
    "rounding": Step(
        (LARGE, SMALL),
        {way: f"{way}, %" for way in WAYS},
        "How far one step of gradient descent in bfloat16 is from the same step in float32, as a share of it. Eight "
        "clients, batch 4, random weights.",
    ),
    "training": Step(
        TRAINING,
        TRAINED,
        "Four local steps of batch 4, log-normal lengths around 80 tokens (320 on 8B), bfloat16, LoRA r = 8 on q and "
        "v. `products` of large matrices are the ceiling of TFLOP/s: four operations per frozen weight and useful "
        "token. Without a word: new examples each round, the mean of five after up to ten. `cold`: the first "
        f"{COLD.split(',')[0]}. `{AGAIN}`: the same batches until all are captured, as in no run. `{DENSE}` is the "
        "limit. `reserved` includes graphs.",
    ),
    "generation": Step(
        tuple(f"{base}, {who}" for base in (SMALL, LARGE) for who in ANSWERING),
        {
            "answers": "answers", "rows": "rows at once", "seconds": "seconds", "tokens_per_second": "new tokens/s",
            "peak_gib": "peak GiB",
        },
        "Answers of eight clients, each under its own adapter, of at most 64 tokens; random weights rarely end early. "
        "`ours`: in slots, captured and fused; `as written`: in slots without; `in batches`: as other families.",
    ),
    "families": Step(
        (
            *(f"llama, {form}" for form in FORMS), *(f"{family}, bf16" for family in FAMILIES[1:]), *WINDOWED,
            f"mixtral, {EXPERTS}",
        ),
        {
            "seconds": "together, s", "alone_seconds": "one by one, s", "replayed": "replayed",
            "padding_free": "no padding", "apart": "apart", "of_rounding": "of rounding", "peak_gib": "peak GiB",
        },
        "Four clients, three steps of gradient descent, as `auto` computes: together, and each client alone as "
        "written. `apart` is their distance as a share of the way that training went, `of rounding` how far they are "
        "from float32, over how far each alone is. Small random models; a `window` is 32 tokens.",
    ),
    "nf4": Step(
        (f"{LARGE}, bf16", f"{LARGE}, nf4", f"{LARGE}, int8"),
        {"seconds": "seconds", "tokens_per_second": "useful tokens/s", "base_gib": "base, GiB", "peak_gib": "peak GiB"},
        "Four steps of eight clients on a base whose weights are quantised as they are loaded; each batch has been "
        "captured.",
    ),
    "real_base": Step(
        METHODS,
        {"first_round": "start to first round, s", "round": "a round, s", "seconds": "the run, s", "score": "score, %"},
        "`llm-fed run` as a user starts it, a process per method: the quickstart's twelve planted clients on the base "
        "in `MODEL`, three rounds of ten steps, exact match on the test prompts.",
    ),
    "comparison": Step(
        ("five methods",),
        {"first_round": "start to first round, s", "draw": "one draw, s", "all": f"{DRAWS} draws, s"},
        f"`llm-fed compare` of {', '.join(COMPARED)} on `MODEL`: eight clients with 300 examples and 100 tests each, "
        "ten rounds of 20 steps of batch 4, answers of up to 64 tokens. One draw is run.",
    ),
    "profile": Step(
        (
            f"{LARGE}, 8 clients", f"{LARGE}, 32 clients", f"{SMALL}, 8 clients",
            *(f"{LARGE}, {clients} clients, {WRITTEN}" for clients in CLIENTS[:2]),
        ),
        {
            "seconds": "seconds",
            "busy": "GPU busy, %",
            "products": "matrix products, % of busy",
            "gaps": "waits for the host, %",
            "launches": "launches per micro-batch",
            "most": "most time",
        },
        "Two repeated steps under torch.profiler, which slows the host, so `waits for the host` is an upper bound.",
    ),
}  # fmt: skip
