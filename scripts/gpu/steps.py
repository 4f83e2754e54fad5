"""The steps of a sitting on a GPU, in order of worth, and the rows and columns of each one's table.

Neither torch nor llm_fed is imported here: `table.py` runs anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE, SMALL = "llama-3.2-3b", "smollm2-135m"
CLIENTS = (8, 32, 100)
PEFT, FLOOR = "stock PEFT, one client after another", "one adapter for all"
ANSWERING = ("ours", "ours, captured", "ours, in batches", "`generate`, one client after another")
MEASURED = "packing as calibrated"
CAPTURED = "captured"  # engine.capture=on
FREE = "padding-free"  # engine.padding_free=on
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
FORMS = ("bf16", "fp32", "nf4", "int8", "activation checkpointing", "all-linear r=16")
METHODS = ("local", "fedit", "fedmerge")

TRAINING = (
    "products",
    f"{LARGE}, 1 client",
    *(
        f"{base}, {row}"
        for base in (LARGE, SMALL)
        for row in (
            "8 clients", f"8 clients, {MEASURED}", f"8 clients, {PEFT}", f"8 clients, {FLOOR}",
            *(f"{clients} clients" for clients in CLIENTS[1:]), f"32 clients, {MEASURED}",
            f"8 clients, {CAPTURED}", f"32 clients, {CAPTURED}",
        )
    ),
    *(
        f"{base}, {clients} clients, {how}"
        for base, clients in ((LARGE, 8), (LARGE, 32), (SMALL, 8))
        for how in (FREE, f"{CAPTURED}, {FREE}")
    ),
    f"{SMALL}, 8 clients, 20 steps",
    f"{SMALL}, 8 clients, 20 steps, {CAPTURED}",
    "llama-3.1-8b, 8 clients, all-linear r=16",
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
    "apart": "apart",
    "peak_gib": "peak GiB",
}
STEPS = {
    "equality": Step(
        ("tests",),
        {"passed": "passed", "skipped": "skipped", "seconds": "seconds"},
        "Tests that hold fused training and answers against the same work client by client, on the GPU.",
    ),
    "training": Step(
        TRAINING,
        TRAINED,
        "Four local steps of batch 4 (where not said otherwise), random weights, log-normal lengths around 80 tokens, "
        "bfloat16, LoRA r = 8 on q and v. `products` is a product of two large square matrices, the ceiling of "
        "TFLOP/s, which count four operations per frozen weight and useful token. With `captured` passes "
        "(`engine.capture=on`) and `padding-free` ones (`engine.padding_free=on`), `replayed` counts micro-batches, "
        "and `apart` is the distance to the result without, as a share of the way that training went.",
    ),
    "generation": Step(
        tuple(f"{base}, {who}" for base in (SMALL, LARGE) for who in ANSWERING),
        {"answers": "answers", "seconds": "seconds", "tokens_per_second": "new tokens/s", "peak_gib": "peak GiB"},
        "Answers of eight clients, each under its own adapter, of at most 64 tokens, from random weights, which rarely "
        "end an answer early. `ours` is in slots, unless it is in batches, as other families of bases are; `captured` "
        "is with `engine.capture=on`.",
    ),
    "families": Step(
        (*(f"llama, {form}" for form in FORMS), *(f"{family}, bf16" for family in FAMILIES[1:])),
        {"seconds": "fused, s", "alone_seconds": "one by one, s", "apart": "apart", "peak_gib": "peak GiB"},
        "Four clients, three steps: fused, and each client alone. `apart` is the distance of the two results as a "
        "share of the way that training went. A small model of each family, with random weights.",
    ),
    "nf4": Step(
        (f"{LARGE}, bf16", f"{LARGE}, nf4", f"{LARGE}, int8"),
        {"seconds": "seconds", "tokens_per_second": "useful tokens/s", "base_gib": "base, GiB", "peak_gib": "peak GiB"},
        "Four steps of eight clients on a base whose weights are quantised as they are loaded.",
    ),
    "real_base": Step(
        METHODS,
        {"first_round": "start to first round, s", "round": "a round, s", "seconds": "the run, s", "score": "score, %"},
        "`llm-fed run` as a user starts it, a process per method: the quickstart's twelve planted clients on the base "
        "in `MODEL`, three rounds of ten steps, exact match on the test prompts.",
    ),
    "profile": Step(
        (f"{LARGE}, 8 clients", f"{LARGE}, 32 clients", f"{SMALL}, 8 clients"),
        {
            "seconds": "seconds",
            "busy": "GPU busy, %",
            "products": "matrix products, % of busy",
            "gaps": "waits for the host, %",
            "launches": "launches per micro-batch",
            "most": "most time",
        },
        "Two local steps under torch.profiler, which slows the host down, so `waits for the host` is an upper bound.",
    ),
}  # fmt: skip
