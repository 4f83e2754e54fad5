"""What the steps measure on cohorts with random weights and examples, and of `llm-fed` as a user starts it."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cohort import SHAPES, Bench, synthetic
from peer_loops import entry_of_peft
from peft import set_peft_model_state_dict
from steps import ALONE, AS_MANY, COMPARED, DENSE, DRAWS, DROPS, EXPERTS, PEFT, ROOT, STOCK, WIDE, WRITTEN
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import llm_fed
from llm_fed.basics.rng import generator
from llm_fed.engine import capture, generation
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.fused import has_library
from llm_fed.engine.generation import most_rows
from llm_fed.kinds.language import Language, load_base
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Fitted, Work
from llm_fed.models.lora import Lora, draw
from llm_fed.models.prompt import Prompt
from llm_fed.settings.config import BaseConfig
from llm_fed.state import State
from llm_fed.tasks.common import Encoded, Template
from llm_fed.testing.tiny import SPECIAL, VOCABULARY, language_base, tokenizer

GIB = 2**30
WARM_UP, WARM_SECONDS, ROUNDS = 10, 20.0, 5  # most rounds that are not counted, for so long; those that are
ANSWERS, NEW_TOKENS, ROWS_OF_STOCK = 130, 64, 32  # per client; of an answer; of a batch of `generate`
LORA = Lora(rank=8, alpha=16, dropout=0.0, target_modules=("q_proj", "v_proj"))
STRUCTURES = {
    WIDE: replace(LORA, rank=16, alpha=32, target_modules="all-linear"),
    EXPERTS: replace(LORA, parameters=("experts.down_proj", "experts.gate_up_proj")),
    DROPS: replace(LORA, dropout=0.05),
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "num_local_experts")  # fmt: skip
SIZES = dict(zip(NAMES, (1024, 2816, 8, 16, 4, 64, 32000, 8), strict=True))
TINY = dict(zip(NAMES, (64, 128, 2, 4, 2, 16, 128, 4), strict=True))
ASSETS = Path(llm_fed.__file__).parent / "assets"
_drawn: dict[str, PreTrainedModel] = {}  # the base of the last cohort


class Skipped(Exception):
    """A case cannot be measured here, for a reason that is no fault."""


@dataclass(frozen=True)
class Setting:
    """Where the steps compute.

    Attributes:
        tiny: tiny shapes on the CPU, which try the steps and measure nothing.
        scratch: a folder for models and runs.
        model: the folder of a real base.
        evidence: the data of Flan.
    """

    tiny: bool
    scratch: Path
    model: Path | None = None
    evidence: Path | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def once(self, run: Callable[[], object]) -> float:
        """The seconds until the device has done it."""
        wait = (lambda: None) if self.tiny else torch.cuda.synchronize
        wait()
        began = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - began


def measured(setting: Setting, step: str, case: str) -> dict[str, Any]:
    """A case's figure, with the libraries and the most memory that was allocated and that torch took of the device,
    which has what graphs keep."""
    free()
    if not setting.tiny:
        torch.cuda.reset_peak_memory_stats()
    liger = version("liger-kernel") if has_library() else "none"
    figure = {**MEASURES[step](setting, case), "transformers": version("transformers"), "liger": liger}
    if setting.tiny:
        return figure
    most = {"peak_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    return {**figure, **{name: round(held / GIB, 2) for name, held in most.items()}}


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def equality(setting: Setting, case: str) -> dict[str, Any]:
    """A file's tests marked `gpu`; with tiny shapes they are only collected."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", case, "-m", "gpu"]
    done = subprocess.run([*words, *(["--collect-only"] * setting.tiny)], cwd=ROOT, capture_output=True, text=True)
    last = "".join(done.stdout.strip().splitlines()[-1:])
    counted = {what: int(number) for number, what in re.findall(r"(\d+)(?:/\d+)? (passed|skipped|tests?)", last)}
    if done.returncode:
        raise RuntimeError(f"{last} ({done.stdout[-2000:]})")
    return {"passed": counted.get("passed", 0), "skipped": counted.get("skipped", 0)}


def training(setting: Setting, case: str) -> dict[str, Any]:
    """A cohort's local steps: `BASE, N clients[, VARIANT]`."""
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    new, wide = variant in ("", "20 steps", DROPS), WIDE in variant  # new: examples in each round
    most, counted = (2, 2) if setting.tiny else (WARM_UP, ROUNDS)
    model = None
    if variant in ("nf4", "int8"):
        shapes = SHAPES["tiny" if setting.tiny else base]
        model = loaded(setting, "llama", shapes, dtype="bfloat16", quantization=variant).model
    bench = bench_of(
        setting, base, int(clients.split()[0]), 20 if "20 steps" in variant else 4, 4 * 100 // 8 if AS_MANY in variant
        else 4, 5.8 if wide else 4.4, most + counted if new else 1, model,
    )  # fmt: skip
    if wide or variant == DROPS:
        bench.structure = STRUCTURES[WIDE if wide else DROPS]
        bench.starts = [draw(bench.model, bench.structure, generator(0, k)) for k in range(bench.args.clients)]
    return as_a_run(setting, bench, most, counted) if new else replayed(setting, bench, variant)


def bench_of(
    setting: Setting, base: str, clients: int = 8, steps: int = 4, batch_size: int = 4, log_length: float = 4.4,
    rounds: int = 1, model: PreTrainedModel | None = None,
) -> Bench:  # fmt: skip
    """A cohort with examples for so many rounds of so many steps, on a model of these shapes if one is given."""
    tiny, steps = setting.tiny, min(steps, 2) if setting.tiny else steps
    args = argparse.Namespace(
        base=None, data=None, shapes="tiny" if tiny else base, device=setting.device,
        dtype="float32" if tiny and model is None else "bfloat16", dropout=0.0, lr=5e-4, budget=None,
        clients={8: 2, 32: 3, 100: 4}[clients] if tiny else clients, batch_size=2 if tiny else batch_size,
        log_length=2.5 if tiny else log_length, steps=[steps, *([steps * rounds] if rounds > 1 else [])],
    )  # fmt: skip
    if base not in _drawn or model is not None:
        _drawn.clear()
        free()
    bench = Bench(args, model or _drawn.get(base))
    if model is None:
        _drawn[base] = bench.model
    return bench


def as_a_run(setting: Setting, bench: Bench, most: int, counted: int) -> dict[str, Any]:
    """Rounds with new examples each: shapes are captured as a run captures them, and what has none is not replayed."""
    steps, model = bench.args.steps[0], fast(bench.adapted(bench.structure))
    every = bench.jobs(steps * (most + counted))

    def jobs(number: int) -> list[Fit]:
        return [replace(job, batches=job.batches[number * steps : (number + 1) * steps]) for job in every]

    before, passed, works = 0, 0.0, list[Work]()
    while before < most and passed < WARM_SECONDS:
        passed += setting.once(partial(trained, model, jobs(before)))
        before += 1
    rounds = range(before, before + counted)
    seconds = setting.once(lambda: works.extend(trained(model, jobs(number))[1] for number in rounds))
    tokens = sum(tokens_of(jobs(number)) for number in rounds)
    return {**figure_of(seconds / counted, tokens / counted, reduce(Work.plus, works)), "rounds": counted}


def replayed(setting: Setting, bench: Bench, variant: str) -> dict[str, Any]:
    """The same batches again; where passes are captured, until all are."""
    (steps,) = bench.args.steps
    jobs, works = bench.jobs(steps), [Work()]
    model, groups = bench.adapted(bench.structure), [jobs]
    model = model if WRITTEN in variant else fast(model)
    if ALONE in variant:
        groups = [[job] for job in jobs]
    elif variant == DENSE:
        groups = [dense(jobs[0], steps, tokens_of(jobs))]

    def run() -> None:
        if variant == PEFT:
            bench.one_by_one(steps)
        else:
            works.append(reduce(Work.plus, (trained(model, group)[1] for group in groups)))

    with patch.object(capture, "USES", 1):  # each shape is captured at its second time, and not later as in a run
        for _ in range(2):
            run()
    return figure_of(min(setting.once(run) for _ in "ab"), tokens_of(jobs), works[-1])


def fast(model: AdaptedModel) -> AdaptedModel:
    """As `auto` computes on a GPU."""
    return replace(model, captures=Captures(), padding_free=True, fuses=True)


def tokens_of(jobs: Sequence[Fit]) -> int:
    batches = [job.batch(step) for job in jobs for step in range(len(job.batches))]
    return sum(len(example.input_ids) for batch in batches for example in batch)


def figure_of(seconds: float, tokens: float, work: Work) -> dict[str, Any]:
    """Of one round; the micro-batches are those of all that were counted."""
    figure: dict[str, Any] = {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds)}
    if work.tokens:
        padded = round(work.padded / work.tokens, 2)
        figure |= {"padded_per_useful": padded, "micro_batches": work.micro_batches, "replayed": work.replayed}
    return {**figure, "why": work.why} if work.why else figure


def dense(job: Fit, steps: int, tokens: int) -> list[Fit]:
    """One client whose steps have as many tokens as those of all, in rows of equal length; a fifth is the response."""
    rows = max(1, round(tokens / steps / 512))
    length, draws = round(tokens / steps / rows), generator(0, "dense")

    def example() -> Encoded:
        ids = torch.randint(2, 1000, (length,), generator=draws).tolist()
        return Encoded(ids, [at >= length - length // 5 for at in range(length)])

    batches = [[example() for _ in range(rows)] for _ in range(steps)]
    return [Fit.on(job.site, job.structure, job.start, batches, job.optimizer)]


def trained(model: AdaptedModel, jobs: Sequence[Fit]) -> tuple[list[State], Work]:
    results, work = fit(model, jobs)
    if failed := [result for result in results if isinstance(result, Exception)]:
        raise failed[0]
    return [result.state for result in results if isinstance(result, Fitted)], work


def families(setting: Setting, case: str) -> dict[str, Any]:
    """A cohort on a small base of a family trains together, and each client alone as written, which must be alike."""
    family, form = case.split(", ")
    sizes: dict[str, Any] = TINY if setting.tiny else SIZES
    if form == "window":  # of fewer tokens than texts have
        also = {"use_sliding_window": True, "max_window_layers": 4} if "qwen" in family else {}
        sizes = {**sizes, "sliding_window": 32, **also}
    settings = {"quantization": form} if form in ("nf4", "int8") else {}
    settings["dtype"] = "float32" if form == "fp32" else "bfloat16"
    base = loaded(setting, family, sizes, activation_checkpointing=form == "activation checkpointing", **settings)
    structure = STRUCTURES.get(form, LORA)
    written = AdaptedModel(base.model, structure, autocast=base.autocast)
    model = replace(fast(written), padding_free=base.autocast == torch.bfloat16)
    draws, jobs = generator(0, "families"), []
    for client in range(2 if setting.tiny else 4):
        batches = [[synthetic(draws, sizes["vocab_size"]) for _ in range(4)] for _ in range(2 if setting.tiny else 3)]
        start = draw(base.model, structure, generator(0, client))
        jobs.append(Fit.on(f"{client}", structure, start, batches, Optimizer(1e-3, name="sgd")))
    trained(written, jobs[:1])  # a warm-up
    for _ in range(USES + 1):  # so that the capture itself is not timed
        trained(model, jobs)
    found, alone = list[Any](), list[State]()
    seconds = setting.once(lambda: found.extend(trained(model, jobs)))
    each = setting.once(lambda: alone.extend(state for job in jobs for state in trained(written, [job])[0]))
    together, work = found
    ways = [float((state - job.start).norm()) for job, state in zip(jobs, alone, strict=True)]
    if min(ways) == 0:
        raise RuntimeError("training went nowhere, so nothing is compared")
    apart = max(distance / way for distance, way in zip(distances(together, alone), ways, strict=True))
    figure = {
        "seconds": round(seconds, 3), "alone_seconds": round(each, 3), "replayed": work.replayed,
        "padding_free": work.padding_free, "apart": float(f"{apart:.2g}"), "why": work.why,
    }  # fmt: skip
    if base.autocast is None or "quantization" in settings:
        return figure
    base.model.float()  # the last use of this base
    truth, _ = trained(replace(written, autocast=None), jobs)
    return {**figure, "of_rounding": round(sum(distances(together, truth)) / sum(distances(alone, truth)), 2)}


def distances(some: list[State], others: list[State]) -> list[float]:
    return [float((one - other).norm()) for one, other in zip(some, others, strict=True)]


def loaded(setting: Setting, family: str, sizes: dict[str, Any], **settings: Any) -> Language:
    """A base of a family with random weights, written to disk and loaded as a run loads it, with settings of `base`."""
    folder = emptied(setting.scratch / "base")
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer(**SPECIAL).save_pretrained(folder)
    del model
    free()
    return load_base(BaseConfig(name=str(folder), **settings), setting.device)


def answers(setting: Setting, case: str) -> dict[str, Any]:
    """Of a cohort, each under its own adapter, or `generate` of stock PEFT for one client, as each takes as long."""
    base, who = case.split(", ", 1)
    bench, tokens = bench_of(setting, base), 4 if setting.tiny else NEW_TOKENS
    draws, count = generator(1, "prompts"), 3 if setting.tiny else ANSWERS

    def prompt() -> list[int]:
        length = int(torch.empty(()).log_normal_(4.4, 0.5, generator=draws).clamp(16, 512))
        return torch.randint(2, VOCABULARY, (length,), generator=draws).tolist()

    prompts = [[prompt() for _ in range(count)] for _ in range(1 if who == STOCK else bench.args.clients)]
    answer = stock if who == STOCK else partial(ours, captures=None if who == WRITTEN else Captures())
    answer(bench, [client[:1] for client in prompts], tokens)  # a warm-up
    seconds, many = setting.once(lambda: answer(bench, prompts, tokens)), sum(map(len, prompts))
    return {"answers": many, "seconds": round(seconds, 2), "tokens_per_second": round(many * tokens / seconds)}


@torch.inference_mode()
def ours(bench: Bench, prompts: list[list[list[int]]], tokens: int, captures: Captures | None) -> None:
    """One batch holds rows of any clients."""
    base = language_base(bench.model, autocast=bench.autocast)
    base.prompt = Prompt(Template("plain", "{prompt}"), (), tokens)  # random weights would end an answer by chance
    bank = bench.adapted(bench.structure).bank(len(prompts))
    for row, start in enumerate(bench.starts):
        bank.load(row, start)
    generation.generate(
        base, bank, [(row, prompt) for row, client in enumerate(prompts) for prompt in client], max_new_tokens=tokens,
        batch_size=most_rows(None, bench.model.device), captures=captures, fuses=captures is not None,
    )  # fmt: skip
    if captures and captures.said:
        raise RuntimeError("; ".join(captures.said))


@torch.inference_mode()
def stock(bench: Bench, prompts: list[list[list[int]]], tokens: int) -> None:
    """A client's adapter after another, its prompts sorted by length."""
    peft: Any = bench.wrapped().eval()
    peft.generation_config.eos_token_id = None
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
    for start, client in zip(bench.starts, prompts, strict=False):
        set_peft_model_state_dict(peft, {entry_of_peft(name): start[name].clone() for name in start})
        ordered = sorted(client, key=len, reverse=True)
        for at in range(0, len(ordered), ROWS_OF_STOCK):
            rows = [torch.tensor(prompt) for prompt in ordered[at : at + ROWS_OF_STOCK]]
            ids = pad_sequence(rows, batch_first=True, padding_side="left").to(bench.args.device)
            with bench.context():
                peft.generate(input_ids=ids, attention_mask=ids.ne(0).long(), **options)
    peft.unload()


def started(setting: Setting, case: str) -> dict[str, Any]:
    """`llm-fed run` and `compare`: the quickstart on a real base, with few and short rounds."""
    model = ASSETS / "tiny-base" if setting.tiny else setting.model
    if model is None:
        raise Skipped("no base is here; give its folder as --model")
    chat = (model / "chat_template.jinja").exists() or "chat_template" in (model / "tokenizer_config.json").read_text()
    sizes = ("rounds=1", "local.steps=1", "eval.limit=4") if setting.tiny else ("rounds=3", "local.steps=10")
    words = [
        str(ASSETS / "quickstart.yaml"), f"base.name={model.resolve()}", "base.dtype=auto", *sizes, "local.lr=1e-3",
        "local.lr_end=1e-3", "eval.every=0", "eval.select=last", "eval.base=false", f"device={setting.device}",
        f"task.template={'chat' if chat else 'alpaca-short'}",
    ]  # fmt: skip
    out = emptied(setting.scratch / case)
    if case == "fedit":
        first, seconds = timed(["run", *words, "method=fedit"], out)
        return {"first_round": round(first, 1), "seconds": round(seconds, 1)}
    methods = ",".join(COMPARED[:2] if setting.tiny else COMPARED)
    first, seconds = timed(["compare", *words, "--methods", methods, "--draws", "1"], out)
    rest = seconds - first
    return {"first_round": round(first, 1), "seconds": round(rest, 1), "all": round(first + DRAWS * rest)}


def evidence(setting: Setting, case: str) -> dict[str, Any]:
    """Ten draws of a comparison on real rows; the step goes on with them where it was stopped."""
    if setting.model is None or setting.evidence is None:
        raise Skipped("it needs --model and --evidence, the data of Flan")
    study, rows = case.split()
    folder, known = setting.scratch / f"{study}-{rows}", {**os.environ, "LLM_FED_DATA": str(setting.evidence)}
    seconds, scores = 0.0, dict[str, list[float]]()
    for number in range(DRAWS):
        task, out = folder / f"data{number}", folder / f"draw{number}"
        if not task.exists():
            script = [sys.executable, str(ROOT / "scripts/default/real_rows.py"), "tasks", str(task)]
            subprocess.run([*script, "--rows", rows, "--seed", str(number)], check=True, env=known)
        words = ["compare", f"{study}.yaml", f"base.name={setting.model.resolve()}", f"task.path={task}"]
        words += [f"rounds={16 if rows == '72' else 8}", f"device={setting.device}", "--seeds", str(number)]
        seconds += timed(words, out)[1]
        for row in json.loads((out / "table.json").read_text())["rows"]:
            scores.setdefault(row["label"], []).append(round(row["seeds"][str(number)]["average"], 1))
    return {"seconds": round(seconds), "scores": scores}


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def timed(words: Sequence[str], out: Path) -> tuple[float, float]:
    """The seconds of an llm-fed command in a process of its own until its first round is timed, and until its end.

    Raises:
        RuntimeError: it failed.
    """
    log = out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    began, first = time.perf_counter(), 0.0
    command = [sys.executable, "-m", "llm_fed.cli", *words, "--out", str(out)]
    with open(log, "wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        while process.poll() is None:
            time.sleep(0.02)
            if not first and any(out.glob("**/timing.jsonl")):
                first = time.perf_counter() - began
    seconds = time.perf_counter() - began
    if process.returncode:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"llm-fed {words[0]} ended with {process.returncode}: {' '.join(tail)}")
    return first or seconds, seconds


MEASURES: dict[str, Callable[[Setting, str], dict[str, Any]]] = {
    "equality": equality, "families": families, "training": training, "generation": answers, "start": started,
    "evidence": evidence, "large": training,
}  # fmt: skip
