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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from cohort import Bench
from peer_loops import entry_of_peft
from peft import set_peft_model_state_dict
from run import Figure
from serving import at_once
from steps import ALONE, AS_MANY, COMPARED, DENSE, DRAWS, DROPS, PEFT, ROOT, SMALL, STOCK, WIDE, WRITTEN
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel

import llm_fed
from llm_fed.basics.rng import generator
from llm_fed.engine import generation
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.capture import Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.fused import has_library
from llm_fed.engine.generation import most_rows
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import draw
from llm_fed.models.prompt import Prompt
from llm_fed.tasks.common import Encoded, Template
from llm_fed.testing.tiny import VOCABULARY, language_base

GIB = 2**30
WARM_UP, ROUNDS = 10, 5  # rounds before those that are counted, and those
ANSWERS, NEW_TOKENS, ROWS_OF_STOCK = 130, 64, 32  # per client; of an answer; of a batch of `generate`
ASSETS = Path(llm_fed.__file__).parent / "assets"
Prompts = list[list[list[int]]]  # by client
_drawn: dict[str, PreTrainedModel] = {}  # the base of the last cohort


@dataclass(frozen=True)
class Setting:
    """Where the steps compute.

    Attributes:
        tiny: tiny shapes on the CPU, which try the steps and measure nothing.
        scratch: a folder for models and runs.
    """

    tiny: bool
    scratch: Path

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


def measured(setting: Setting, step: str, case: str) -> Figure:
    """A case's figure, with the libraries and the most memory that was allocated and that torch took of the device,
    which has what graphs keep."""
    free()
    if not setting.tiny:
        torch.cuda.reset_peak_memory_stats()
    liger = version("liger-kernel") if has_library() else "none"
    figure = {**MEASURES[step](setting, case), "transformers": version("transformers"), "liger": liger}
    if not setting.tiny:
        figure["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        figure["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    return figure


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def equality(setting: Setting, case: str) -> Figure:
    """A file's tests marked `gpu`; with tiny shapes they are only collected."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", case, "-m", "gpu"]
    done = subprocess.run([*words, *(["--collect-only"] * setting.tiny)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    counted = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)", done.stdout)}
    return {"passed": counted.get("passed", 0), "skipped": counted.get("skipped", 0)}


def training(setting: Setting, case: str) -> Figure:
    """A cohort's local steps: `BASE, N clients[, VARIANT]`. Each round has new examples, as shapes then are captured as
    a run captures them; stock PEFT and dense rows, whose shapes do not matter, have the same."""
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    before, counted = (2, 2) if setting.tiny else (WARM_UP, ROUNDS)
    steps = 2 if setting.tiny else 20 if "20 steps" in variant else 4
    bench = bench_of(setting, base, variant, int(clients.split()[0]), steps * (before + counted))
    model, every, works = bench.adapted(bench.structure), bench.jobs(steps * (before + counted)), [Work()]
    if variant != WRITTEN:  # as `auto` computes on a GPU
        model = replace(model, captures=Captures(), padding_free=True, fuses=True)

    def jobs(number: int) -> list[Fit]:
        return [replace(job, batches=job.batches[number * steps : (number + 1) * steps]) for job in every]

    first = jobs(0)
    rows = dense(first[0], steps, tokens_of(first)) if variant == DENSE else None

    def run(numbers: range) -> None:
        for number in numbers:
            if variant == PEFT:
                bench.one_by_one(steps)
                continue
            its = [rows] if rows else jobs(number)
            groups = [[job] for job in its] if variant == ALONE else [its]
            works.extend(trained(model, group) for group in groups)

    run(range(before))
    works[:] = [Work()]
    seconds = setting.once(lambda: run(range(before, before + counted))) / counted
    same = variant in (PEFT, DENSE)
    tokens = sum(tokens_of(first if same else jobs(before + number)) for number in range(counted)) / counted
    return figure_of(seconds, tokens, reduce(Work.plus, works))


def bench_of(setting: Setting, base: str, variant: str, clients: int, steps: int) -> Bench:
    """A cohort on a base of these shapes, with examples for so many steps."""
    tiny, wide = setting.tiny, variant == WIDE
    args = argparse.Namespace(
        base=None, data=None, shapes="tiny" if tiny else base, device=setting.device, lr=5e-4, budget=None,
        dtype="float32" if tiny else "bfloat16", dropout=0.05 if variant == DROPS else 0.0,
        clients=2 if tiny else clients, batch_size=2 if tiny else 50 if variant == AS_MANY else 4,
        log_length=2.5 if tiny else 5.8 if wide else 4.4, steps=[steps],
    )  # fmt: skip
    if base not in _drawn:
        _drawn.clear()
        free()
    bench = Bench(args, _drawn.get(base))
    _drawn[base] = bench.model
    if wide:
        bench.structure = replace(bench.structure, rank=16, alpha=32, target_modules="all-linear")
        bench.starts = [draw(bench.model, bench.structure, generator(0, k)) for k in range(args.clients)]
    return bench


def tokens_of(jobs: Sequence[Fit]) -> int:
    batches = [job.batch(step) for job in jobs for step in range(len(job.batches))]
    return sum(len(example.input_ids) for batch in batches for example in batch)


def figure_of(seconds: float, tokens: float, work: Work) -> Figure:
    """Of one round; the micro-batches are those of all that were counted."""
    figure: Figure = {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds)}
    if work.tokens:
        padded = round(work.padded / work.tokens, 2)
        figure |= {"padded_per_useful": padded, "micro_batches": work.micro_batches, "replayed": work.replayed}
    return figure | {"why": work.why} if work.why else figure


def dense(job: Fit, steps: int, tokens: int) -> Fit:
    """One client whose steps have as many tokens as those of all, in rows of equal length; a fifth is the response."""
    rows = max(1, round(tokens / steps / 512))
    length, draws = round(tokens / steps / rows), generator(0, "dense")

    def example() -> Encoded:
        ids = torch.randint(2, 1000, (length,), generator=draws).tolist()
        return Encoded(ids, [at >= length - length // 5 for at in range(length)])

    examples = [example() for _ in range(rows * steps)]
    batches = [range(at, at + rows) for at in range(0, len(examples), rows)]
    return Fit(job.site, job.structure, job.start, examples, batches, job.optimizer)


def trained(model: AdaptedModel, jobs: Sequence[Fit]) -> Work:
    results, work = fit(model, jobs)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return work


def answers(setting: Setting, case: str) -> Figure:
    """Of a cohort, each under its own adapter, or `generate` of stock PEFT for one client, as each takes as long."""
    base, who = case.split(", ", 1)
    bench, tokens = bench_of(setting, base, "", 8, 1), 4 if setting.tiny else NEW_TOKENS
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
def ours(bench: Bench, prompts: Prompts, tokens: int, captures: Captures | None) -> None:
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
def stock(bench: Bench, prompts: Prompts, tokens: int) -> None:
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


def started(setting: Setting, case: str) -> Figure:
    """`llm-fed run` and `compare`: the quickstart with few and short rounds."""
    base, sizes = ASSETS / "tiny-base", ["rounds=1", "local.steps=1", "eval.limit=4"]
    if not setting.tiny:
        base, sizes = setting.scratch / SMALL, ["rounds=3", "local.steps=10"]
        bench_of(setting, SMALL, "", 1, 1).model.save_pretrained(base)
        AutoTokenizer.from_pretrained(ASSETS / "tiny-base").save_pretrained(base)
    words = [
        str(ASSETS / "quickstart.yaml"), f"base.name={base}", "base.dtype=auto", *sizes, "local.lr=1e-3",
        "local.lr_end=1e-3", "eval.every=0", "eval.select=last", "eval.base=false", f"device={setting.device}",
    ]  # fmt: skip
    out = setting.scratch / case
    shutil.rmtree(out, ignore_errors=True)
    if case == "fedit":
        first, seconds = timed(["run", *words, "method=fedit"], out)
        return {"first_round": round(first, 1), "seconds": round(seconds, 1)}
    first, seconds = timed(["compare", *words, "--methods", ",".join(COMPARED), "--draws", "1"], out)
    rest = seconds - first
    return {"first_round": round(first, 1), "seconds": round(rest, 1), "all": round(first + DRAWS * rest)}


def timed(words: Sequence[str], out: Path) -> tuple[float, float]:
    """The seconds of an llm-fed command until its first round is timed, and until its end. RuntimeError: it failed."""
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
        raise RuntimeError(f"llm-fed {words[0]} ended with {process.returncode}: {log.read_text()[-300:]}")
    return first or seconds, seconds


def evidence(setting: Setting, case: str) -> Figure:
    """A draw of a question on a real base: each row's mean test score. RuntimeError: there is no base, or it failed."""
    words, _, rows = case.partition(": ")
    scores = setting.scratch.with_name("rows")
    places = {"SCORES": str(scores), "WORK": str(setting.scratch / "evidence")}
    base, rows = (ASSETS / "tiny-base", "local,fedit") if setting.tiny else (Path(os.environ.get("BASE", "")), rows)
    if not (base / "config.json").exists():
        raise RuntimeError(f"BASE={base} is no folder of a base; scripts/evidence/smollm2.py makes one")
    given = {**os.environ, **places, "BASE": str(base.absolute()), "PYTHON": sys.executable, "ROWS": rows}
    given["LLM_FED_DATA"] = str(Path(given.get("LLM_FED_DATA", "")).absolute())
    settings = [f"device={setting.device}", *(["rounds=1", "local.steps=1", "eval.limit=2"] if setting.tiny else ())]
    command = ["bash", str(ROOT / "scripts/evidence/draw.sh"), *words.split(), *settings]
    began, done = time.perf_counter(), subprocess.run(command, env=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    question, own, draw = words.split()
    kept = (scores / f"{question}_{own}_{given.get('BASE_NAME', base.name)}.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, kept) if line["seed"] == int(draw)]
    shown = [line for line in lines if line["row"] in ("base", "rule", *rows.split(",")) or not rows]
    figure = {line["row"].split()[0]: round(fmean(line["scores"].values()), 2) for line in shown}
    return {"seconds": round(time.perf_counter() - began, 1), **figure}


def served(setting: Setting, case: str) -> Figure:
    """Chats that come at once to the models of a run with twelve clients."""
    if not (setting.scratch / "fedit/summary.json").exists():
        started(setting, "fedit")
    count, tokens = int(case.split()[0]), 4 if setting.tiny else NEW_TOKENS
    with server(setting.scratch / "fedit") as url:
        load = at_once(url, [f"Name the pen of toad {n}." for n in range(count)], count=count, tokens=tokens)
    return {"answers": load.answers, "seconds": round(load.seconds, 2), "tokens_per_second": round(load.rate, 1)}


@contextmanager
def server(run: Path) -> Iterator[str]:
    """The address of `llm-fed serve` of a run, which ends with the context. RuntimeError: it did not begin."""
    command = [sys.executable, "-m", "llm_fed.cli", "serve", str(run), "--port", "0", "--queue", "1000"]
    log = run.with_suffix(".serve.log")
    with open(log, "wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            while not (found := re.search(r" at (http\S+/v1)\n", log.read_text())):
                if process.poll() is not None:
                    raise RuntimeError(f"llm-fed serve ended with {process.returncode}: {log.read_text()[-300:]}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()


MEASURES: dict[str, Callable[[Setting, str], Figure]] = {
    "equality": equality, "training": training, "generation": answers, "start": started, "evidence": evidence,
    "large": training, "serve": served,
}  # fmt: skip
