"""Answers of many clients in one running batch: greedy or sampled generation and option scoring, each row under its own
adapter.

Shape letters: N rows of a batch, T tokens with padding, V vocabulary, R options of all rows, E experts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llm_fed.basics import signs
from llm_fed.basics.errors import UserError
from llm_fed.engine import continuous
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.capture import Captures
from llm_fed.engine.examples import TEXT
from llm_fed.engine.inference import log_likelihoods
from llm_fed.engine.memory import within_memory
from llm_fed.engine.slots import SlotBatch, allowed
from llm_fed.models.base import Base
from llm_fed.models.families import feels_padding
from llm_fed.models.prompt import stop_tokens
from llm_fed.models.rotary import context, regimes
from llm_fed.tasks.common import Encoded
from llm_fed.tasks.control import THINK, answer_of
from llm_fed.tasks.templates import filled

log = logging.getLogger(__name__)

ROWS = {"cpu": 32}  # of a batch, where `eval.batch_size` says nothing
ROWS_ON_GPU = 256  # 1,040 answers of a base of 135M took 2.98 s on an H200, with 1,024 rows 3.88 s, with 32 rows 20.5 s
TOKENS, LOGITS = 2**14, 2**27  # that a batch holds on a CPU, where nobody says that memory does not suffice

PromptRequest = tuple[int, Sequence[int]]  # row of the bank, token ids of the prompt
Scored = tuple[int, Sequence[int], Sequence[Sequence[int]]]  # the same, and token ids of each option


@torch.inference_mode()
def generate(
    base: Base,
    bank: AdapterBank,
    requests: Sequence[PromptRequest],
    *,
    max_new_tokens: int,
    batch_size: int,
    mix: Tensor | None = None,
    captures: Captures | None = None,
    fuses: bool = False,
    free: Callable[[], None] = lambda: None,
) -> list[str]:
    """Greedy answers, in the order of the requests; the base's own sampling settings do not count.

    An answer ends before the first EOS (any of the base's), after `max_new_tokens`, or where the context is full. It
    does not depend on the rows beside it, up to the rounding of a batched product (in half precision a near tie of two
    tokens may fall either way); a base that feels padding answers prompts of one length together.

    Args:
        requests: (row of the bank, token ids of the prompt); no prompt is truncated.
        batch_size: rows of a forward pass at most, whichever adapter they use; half as many where memory does not
            suffice.
        mix: (len(requests), E), where the gate of the bank's structure is `mix`.
        captures, fuses: as of `SlotBatch`; None: steps run as they are written.
        free: gives memory back where it does not suffice, before fewer rows are tried.

    Raises:
        UserError: an empty prompt, or one that is longer than the base's context.
        RunError: memory does not suffice for one row.
    """
    rooms = [_room(base, prompt, max_new_tokens) for _, prompt in requests]
    columns = max((len(prompt) + room for (_, prompt), room in zip(requests, rooms, strict=True)), default=0)
    texts: list[str | None] = [None] * len(requests)
    # Longest first: if memory does not suffice, that shows at once.
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]))

    def answer(rows: int) -> None:
        left, stops = [i for i in order if texts[i] is None], stop_tokens(base)
        answers: dict[int, list[int]] = {i: [] for i in left}

        def hear(i: int, token: int | Exception | None) -> None:
            if isinstance(token, int):
                answers[i].append(token)
            else:
                texts[i] = answer_text(base, requests[i][1], answers[i])
                signs.listener.get().answered(1)

        waiting = []
        for i in left:
            row, prompt = requests[i]
            own = None if mix is None else mix[i : i + 1]
            waiting.append(continuous.LiveAnswer(row, [*prompt], rooms[i], stops, partial(hear, i), own))
        batch = continuous.RunningBatch(base, bank, rows)
        if captures and captures.answers and allowed(base, bank):
            batch = SlotBatch(base, bank, rows, columns, captures, fuses)
        with closing(batch):
            for _ in continuous.in_turn(batch, waiting):
                pass

    within_memory(answer, min(len(requests), _fitting(base, batch_size, columns)) or 1, partial(_fewer, free))
    return [text or "" for text in texts]


@torch.inference_mode()
def stream(
    base: Base,
    bank: AdapterBank,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    mix: Tensor | None = None,
    sampling: continuous.Sampling | None = None,
) -> Iterator[int]:
    """The tokens of one answer under row 0 of the bank, each as soon as it is known; see `generate`. The bank is
    attached until the last one is taken, or the iterator is closed. `sampling`: None: it is greedy."""
    room, said = _room(base, prompt, max_new_tokens), list[int | Exception | None]()
    choose = None if sampling is None else sampling.chooser(base.model.device)
    answer = continuous.LiveAnswer(0, [*prompt], room, stop_tokens(base), said.append, mix, choose)
    for _ in continuous.in_turn(continuous.RunningBatch(base, bank, 1), [answer]):
        yield from (token for token in said if isinstance(token, int))
        said.clear()


@torch.inference_mode()
def option_log_likelihoods(
    base: Base,
    bank: AdapterBank,
    requests: Sequence[Scored],
    *,
    batch_size: int,
    mix: Tensor | None = None,
    free: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """The log-likelihood of each option after its prompt: the sum over the option's tokens, in nats.

    Nothing is generated, and a prompt is processed once for all its options.

    Args:
        requests: (row of the bank, token ids of the prompt, token ids of each option).
        batch_size: options per forward pass at most; a request with more of them has its own pass.
        mix: (len(requests), E), where the gate of the bank's structure is `mix`.
        free: as of `generate`.

    Raises:
        UserError: an empty prompt, an empty option or no option, or more tokens than the base's context.
        RunError: memory does not suffice for one request.
    """
    for _, prompt, options in requests:
        if not options or not all(options):
            raise UserError(
                "option scoring needs at least one option per example and one token per option; one is empty"
            )
        _room(base, prompt, max(map(len, options)), at_least=max(map(len, options)))
    whole = {i: request for i, request in enumerate(requests) if _grows_otherwise(base, request)}
    results = _score_whole(base, bank, whole, mix)
    tokens = max((len(option) for _, _, options in requests for option in options), default=0)
    columns = max((len(prompt) for _, prompt, _ in requests), default=0) + tokens

    def score(rows: int) -> None:
        for chosen in _batches(requests, [i for i in range(len(requests)) if i not in results], rows):
            batch = [requests[i] for i in chosen]
            scores = iter(_score(base, bank, batch, None if mix is None else mix[chosen]))
            results.update({i: [next(scores) for _ in requests[i][2]] for i in chosen})
            signs.listener.get().answered(len(chosen))

    within_memory(score, _fitting(base, batch_size, columns, tokens), partial(_fewer, free))
    return [results[i] for i in range(len(requests))]


def most_rows(requested: int | None, device: torch.device) -> int:
    """The most rows of a batch of answers: as requested, or by device."""
    return requested or ROWS.get(device.type, ROWS_ON_GPU)


def _fitting(base: Base, rows: int, columns: int, logits: int = 0) -> int:
    """So many rows, or as many as a CPU takes. `columns`: tokens of a row. `logits`: tokens of a row that have them."""
    if base.device.type != "cpu":
        return rows
    return max(1, min(rows, TOKENS // max(1, columns), LOGITS // max(1, logits * base.rows)))


def _fewer(free: Callable[[], None]) -> None:
    log.warning("memory did not suffice for so many answers at once; half as many rows are tried")
    free()


def _batches(requests: Sequence[Scored], chosen: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Places of requests, the longest first, with so many options together, or of one request."""
    batch: list[int] = []
    held = 0
    for i in sorted(chosen, key=lambda i: -len(requests[i][1])):
        count = len(requests[i][2])
        if batch and held + count > rows:
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += count
    if batch:
        yield batch


def _score(base: Base, bank: AdapterBank, batch: Sequence[Scored], mix: Tensor | None) -> list[float]:
    """The log-likelihoods of all options of the batch, one request after another (R)."""
    device = base.model.device
    index = torch.tensor([row for row, _, _ in batch])
    owner = torch.tensor([n for n, (_, _, options) in enumerate(batch) for _ in options])
    options = [torch.tensor(option) for _, _, options in batch for option in options]
    ids, mask = continuous.pad_left([prompt for _, prompt, _ in batch], device)
    padded = any(len(prompt) < mask.shape[1] for _, prompt, _ in batch)
    with bank.attached(index, mix=mix):
        logits, cache = continuous.forward(base, ids, mask, None, keep=1, padded=padded)
    indices = owner.to(device)
    logits = logits[indices]  # (R, 1, V)
    labels = pad_sequence(options, batch_first=True).to(device)  # (R, T)
    real = pad_sequence([torch.ones_like(option) for option in options], batch_first=True).to(device)
    if labels.shape[1] > 1:
        continuous.select(cache, indices)
        mask = torch.cat([mask[indices], real[:, 1:]], dim=1)
        padded = padded or len(set(map(len, options))) > 1
        with bank.attached(index[owner], mix=None if mix is None else mix[owner]):
            rest, _ = continuous.forward(base, labels[:, :-1], mask, cache, keep=labels.shape[1] - 1, padded=padded)
        logits = torch.cat([logits, rest], dim=1)  # (R, T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)
    scores: list[float] = torch.where(real.bool(), picked, 0.0).sum(1).tolist()
    if any(map(math.isnan, scores)):
        raise continuous.not_a_number(base, max(len(prompt) for _, prompt, _ in batch))
    return scores


def _grows_otherwise(base: Base, request: Scored) -> bool:
    """Whether a prompt may be read otherwise with one of its options behind it than alone, see `rotary.Regimes`; so
    may a family's that feels padding, as options of unequal length are padded."""
    rotary, (_, prompt, options) = regimes(base.model), request
    sizes = [len(prompt), *(len(prompt) + len(option) for option in options)]
    crosses = rotary is not None and len({rotary.of(size) for size in sizes}) > 1
    return crosses or feels_padding(base.model.config)


def _score_whole(
    base: Base, bank: AdapterBank, requests: Mapping[int, Scored], mix: Tensor | None
) -> dict[int, list[float]]:
    """The log-likelihoods of options whose prompts are read anew with each option."""
    owners = [i for i, (_, _, options) in requests.items() for _ in options]
    texts = [
        Encoded([*prompt, *option], [False] * len(prompt) + [True] * len(option))
        for _, prompt, options in requests.values()
        for option in options
    ]
    model = AdaptedModel(base.model, bank.structure, autocast=base.autocast)
    weights, rows = None if mix is None else mix[owners], [requests[i][0] for i in owners]
    found = model.within_memory(lambda within: log_likelihoods(within, bank, texts, mix=weights, rows=rows))
    if any(map(math.isnan, found)):
        raise continuous.not_a_number(base, max(map(TEXT.length, texts)))
    scores = iter(found)
    return {i: [next(scores) for _ in options] for i, (_, _, options) in requests.items()}


def _room(base: Base, prompt: Sequence[int], wanted: int, at_least: int = 1) -> int:
    """How many of the wanted tokens fit after the prompt; the last one is not read, so it needs no place."""
    if not prompt:
        raise UserError("a prompt has no tokens; use a template that puts text around it (task.template)")
    room = room_after(base, len(prompt), wanted)
    if room < at_least:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves no room for an answer of {at_least}: the context of "
            f"{base.name!r} is {context(base.model.config)} tokens; lower task.max_length, so that longer examples "
            "are skipped"
        )
    return room


def room_after(base: Base, prompt: int, wanted: int) -> int:
    """How many of the wanted tokens may follow a prompt of so many; the token that ends an answer needs no room."""
    limit = context(base.model.config)
    return wanted if limit is None else min(wanted, limit - prompt + 1)


def answer_text(base: Base, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of generated tokens, without the reasoning before an answer, which a prompt may have begun. Where the
    tokenizer has a token of `<think>`, other tokens that read so are text."""
    read = base.tokenizer
    text = str(read.decode([*tokens], skip_special_tokens=True))
    # The tag begins reasoning where the template may end a prompt with it, and not where the user alone did.
    if str(read.decode([*prompt[-8:]])).rstrip().endswith(THINK) and (
        base.prompt is None or filled(base.prompt.template, base.tokenizer).opens
    ):
        return answer_of(THINK + text).strip()
    if THINK not in text:
        return text.strip()
    tag = read.get_added_vocab().get(THINK)
    return (text if tag is not None and tag not in tokens else answer_of(text)).strip()
