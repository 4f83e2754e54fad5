"""Answers of many clients in one batch: greedy generation and option scoring, each row under its own adapter.

Shape letters: N rows of a batch, T tokens with padding, V vocabulary, R options of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llm_fed.basics import signs
from llm_fed.basics.errors import UserError
from llm_fed.engine import reading
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.batch_limits import BatchLimit, in_turn, within
from llm_fed.engine.capture import Captures
from llm_fed.engine.examples import TEXT
from llm_fed.engine.prefixes import PromptRequest, batches, ordered, shared_prefixes
from llm_fed.engine.sampling import Choose, Sampling
from llm_fed.engine.slots import Slots, allowed
from llm_fed.models.base import Base
from llm_fed.models.families import feels_padding
from llm_fed.models.prompt import stop_tokens
from llm_fed.models.rotary import context, regimes
from llm_fed.tasks.common import Encoded
from llm_fed.tasks.control import THINK, answer_of
from llm_fed.tasks.templates import filled

_NAN = -1  # stands for a token where the logits are no numbers

Scored = tuple[int, Sequence[int], Sequence[Sequence[int]]]  # the same, and token ids of each option
Score = Callable[[Base, AdapterBank, Sequence[Scored], Tensor | None], list[float]]


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
    end_to_end: bool = False,
    free: Callable[[], None] = lambda: None,
) -> list[str]:
    """Greedy answers, in the order of the requests; the base's own sampling settings do not count.

    An answer ends before the first EOS (any of the base's), after `max_new_tokens`, or where the context is
    full. It does not depend on the rows beside it, up to the rounding of a batched product (in half precision a
    near tie of two tokens may fall either way); a base that feels padding answers prompts of one length together.
    Unlike in `model.generate`, a row leaves the batch when its answer ends, and the next prompt takes its place where
    the family allows it (`slots`); a beginning that an adapter's prompts share is read once per batch, where that pays.

    Args:
        requests: (row of the bank, token ids of the prompt); no prompt is truncated.
        batch_size: rows of a forward pass at most (`batch_limits`), sorted by length, whichever adapter they use.
        mix: (len(requests), E), where the gate of the bank's structure is `mix`.
        captures: steps in slots are captured; None: they run as they are written.
        fuses: whether captured steps compute elementwise work `fused`.
        end_to_end: prompts that are answered in slots are read without padding; the base and the adapters allow it.
        free: gives memory back where it does not suffice, before fewer rows are tried.

    Raises:
        UserError: an empty prompt, or one that is longer than the base's context.
    """
    stops = stop_tokens(base)
    rooms = [_room(base, prompt, max_new_tokens) for _, prompt in requests]
    texts = [""] * len(requests)
    shared = _shared(base, requests, mix)

    def ended(i: int, tokens: Sequence[int]) -> None:
        texts[i] = answer_text(base, requests[i][1], tokens)
        signs.answered(1)

    def answer(chosen: Sequence[int]) -> None:
        weights = None if mix is None else mix[chosen]
        answers: list[list[int]] = [[] for _ in chosen]
        batch = [requests[i] for i in chosen]
        for n, token in _tokens(base, bank, batch, [rooms[i] for i in chosen], stops, weights, shared):
            answers[n].append(token)
        for i, tokens in zip(chosen, answers, strict=True):
            ended(i, tokens)

    def answer_in_slots(chosen: Sequence[int], size: int) -> Iterator[int]:
        memory = Slots(
            base, bank, requests, size, rooms=rooms, stops=stops, mix=mix, captures=captures, fuses=fuses,
            end_to_end=end_to_end and not bank.adapts_head and not any(shared.values()),
        )  # fmt: skip
        for i, tokens in memory.answers(chosen, shared):
            ended(i, tokens)
            yield i

    # Longest first: if memory does not suffice, that shows at once.
    limit = BatchLimit(base, batch_size, max_new_tokens).rows
    if requests and allowed(base):
        most = min(len(requests), limit(max(len(prompt) for _, prompt in requests)))
        in_turn(ordered(requests, shared), most, answer_in_slots, free)
    else:
        even = feels_padding(base.model.config)
        for chosen in batches(requests, [1] * len(requests), limit, shared, even=even):
            within(chosen, answer, free)
    return texts


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

    Nothing is generated; a prompt is processed once for all its options, and a beginning that prompts share once
    per batch, where that pays.

    Args:
        requests: (row of the bank, token ids of the prompt, token ids of each option).
        batch_size: options per forward pass at most (`batch_limits`); a request with more of them has its own pass.
        mix: (len(requests), E), where the gate of the bank's structure is `mix`.
        free: as of `generate`.

    Raises:
        UserError: an empty prompt, an empty option or no option, or more tokens than the base's context.
    """
    for _, prompt, options in requests:
        if not options or not all(options):
            raise UserError(
                "option scoring needs at least one option per example and one token per option; one is empty"
            )
        _room(base, prompt, max(map(len, options)), at_least=max(map(len, options)))
    results: list[list[float]] = [[] for _ in requests]
    asked = [(row, prompt) for row, prompt, _ in requests]
    whole = [i for i, request in enumerate(requests) if _grows_otherwise(base, request)]
    begun = sorted({*range(len(requests))}.difference(whole))
    shared = _shared(base, [asked[i] for i in begun], mix)
    tokens = max((len(option) for _, _, options in requests for option in options), default=0)
    limit = BatchLimit(base, batch_size, tokens, logits=tokens).rows
    for places, score in ((begun, partial(_score, shared=shared)), (whole, _score_whole)):

        def answer(chosen: Sequence[int], score: Score = score) -> None:
            scores = iter(score(base, bank, [requests[i] for i in chosen], None if mix is None else mix[chosen]))
            for i in chosen:
                results[i] = [next(scores) for _ in requests[i][2]]
            signs.answered(len(chosen))

        sizes = [len(requests[i][2]) for i in places]
        for chosen in batches([asked[i] for i in places], sizes, limit, shared if places is begun else {}):
            within([places[place] for place in chosen], answer, free)
    return results


@torch.inference_mode()
def stream(
    base: Base,
    bank: AdapterBank,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    mix: Tensor | None = None,
    sampling: Sampling | None = None,
) -> Iterator[int]:
    """The tokens of one answer under row 0 of the bank, each as soon as it is known; see `generate`.

    The bank is attached until the last one is taken, or the iterator is closed.

    Args:
        sampling: None: it is greedy.
    """
    room = _room(base, prompt, max_new_tokens)
    choose = sampling.chooser(base.model.device) if sampling else None
    for _, token in _tokens(base, bank, [(0, prompt)], [room], stop_tokens(base), mix, {}, choose):
        yield token


def _tokens(
    base: Base,
    bank: AdapterBank,
    batch: Sequence[PromptRequest],
    rooms: Sequence[int],
    stops: set[int],
    mix: Tensor | None,
    shared: Mapping[int, int],
    choose: Choose | None = None,
) -> Iterator[tuple[int, int]]:
    """(n, token) of every row's next token, in the order in which they become known: at most rooms[n] of a row,
    without the token that ends it.

    Args:
        choose: instead of the likeliest token.
    """
    texts = [[*prompt] for _, prompt in batch]
    rotary, going = regimes(base.model), list(range(len(batch)))
    while going:
        border = rotary.border if rotary is not None and rotary.read_again else None
        again: list[int] = []
        asked = [(batch[n][0], tuple(texts[n])) for n in going]
        left = [rooms[n] - len(texts[n]) + len(batch[n][1]) for n in going]
        weights = None if mix is None else mix[going]
        for place, token, leaves in _read(base, bank, asked, left, stops, weights, shared, border, choose):
            n = going[place]
            texts[n].append(token)
            yield n, token
            if leaves:
                again.append(n)
        going, shared = again, {}


def _read(
    base: Base,
    bank: AdapterBank,
    batch: Sequence[PromptRequest],
    rooms: Sequence[int],
    stops: set[int],
    mix: Tensor | None,
    shared: Mapping[int, int],
    border: int | None,
    choose: Choose | None = None,
) -> Iterator[tuple[int, int, bool]]:
    """(n, token, whether the row leaves here to be read again) of every row's next token, see `_tokens`; a row leaves
    where its text has just grown beyond the border."""
    index = torch.tensor([row for row, _ in batch])
    ids, mask, cache = reading.begin(base, bank, batch, shared)
    width = mask.shape[1]
    lengths = [0] * len(batch)
    live = list(range(len(batch)))
    while live:
        padded = any(len(batch[n][1]) < width for n in live)
        with bank.attached(index[live], mix=None if mix is None else mix[live]):
            going = live
            while going == live:
                logits, cache = reading.forward(base, ids, mask, cache, keep=1, padded=padded)
                best, ids = logits[:, -1].max(-1, keepdim=True)  # (N, 1); NaN if any logit is
                if choose is not None and not best.isnan().any():
                    ids = choose(logits[:, -1])
                going = []
                for n, token in zip(live, torch.where(best.isnan(), _NAN, ids)[:, 0].tolist(), strict=True):
                    if token == _NAN:
                        raise reading.not_a_number(base, len(batch[n][1]) + lengths[n])
                    if token not in stops:
                        lengths[n] += 1
                        wanted = lengths[n] < rooms[n]
                        leaves = wanted and border is not None and len(batch[n][1]) + lengths[n] == border + 1
                        yield n, token, leaves
                        if wanted and not leaves:
                            going.append(n)
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if going:
            kept = torch.tensor([live.index(n) for n in going], device=ids.device)
            reading.select(cache, kept)
            ids, mask = ids[kept], mask[kept]
        live = going


def _score(
    base: Base, bank: AdapterBank, batch: Sequence[Scored], mix: Tensor | None, shared: Mapping[int, int]
) -> list[float]:
    """The log-likelihoods of all options of the batch, one request after another (R)."""
    device = base.model.device
    index = torch.tensor([row for row, _, _ in batch])
    owner = torch.tensor([n for n, (_, _, options) in enumerate(batch) for _ in options])
    options = [torch.tensor(option) for _, _, options in batch for option in options]
    ids, mask, cache = reading.begin(base, bank, [(row, prompt) for row, prompt, _ in batch], shared)
    padded = any(len(prompt) < mask.shape[1] for _, prompt, _ in batch)
    with bank.attached(index, mix=mix):
        logits, cache = reading.forward(base, ids, mask, cache, keep=1, padded=padded)
    places = owner.to(device)
    logits = logits[places]  # (R, 1, V)
    labels = pad_sequence(options, batch_first=True).to(device)  # (R, T)
    real = pad_sequence([torch.ones_like(option) for option in options], batch_first=True).to(device)
    if labels.shape[1] > 1:
        reading.select(cache, places)
        mask = torch.cat([mask[places], real[:, 1:]], dim=1)
        padded = padded or len(set(map(len, options))) > 1
        with bank.attached(index[owner], mix=None if mix is None else mix[owner]):
            rest, _ = reading.forward(base, labels[:, :-1], mask, cache, keep=labels.shape[1] - 1, padded=padded)
        logits = torch.cat([logits, rest], dim=1)  # (R, T, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)
    scores: list[float] = torch.where(real.bool(), picked, 0.0).sum(1).tolist()
    if any(map(math.isnan, scores)):
        raise reading.not_a_number(base, max(len(prompt) for _, prompt, _ in batch))
    return scores


def _grows_otherwise(base: Base, request: Scored) -> bool:
    """Whether a prompt may be read otherwise with one of its options behind it than alone, see `rotary.Regimes`; so
    may a family's that feels padding, as options of unequal length are padded."""
    rotary, (_, prompt, options) = regimes(base.model), request
    crosses = rotary is not None and any(rotary.crosses(len(prompt), len(prompt) + len(option)) for option in options)
    return crosses or feels_padding(base.model.config)


def _score_whole(base: Base, bank: AdapterBank, batch: Sequence[Scored], mix: Tensor | None) -> list[float]:
    """As `_score`, of prompts that are read anew with each option."""
    owner = torch.tensor([n for n, (_, _, options) in enumerate(batch) for _ in options])
    texts = [
        Encoded([*prompt, *option], [False] * len(prompt) + [True] * len(option))
        for _, prompt, options in batch
        for option in options
    ]
    index, picked = torch.tensor([row for row, _, _ in batch])[owner], TEXT.collate(texts)
    with bank.attached(index, mix=None if mix is None else mix[owner]), base.computing():
        losses = TEXT.losses(base.model, picked, all_rows=bank.adapts_head).double().cpu()
    scores: list[float] = (-torch.zeros(len(texts), dtype=torch.float64).index_add_(0, picked.rows, losses)).tolist()
    if any(map(math.isnan, scores)):
        raise reading.not_a_number(base, max(map(TEXT.length, texts)))
    return scores


def _shared(base: Base, requests: Sequence[PromptRequest], mix: Tensor | None) -> dict[int, int]:
    """`shared_prefixes`, of which there are none where a prompt's own weights mix the adapters it is read under, or
    where a beginning alone would be read otherwise than within its prompt."""
    if mix is not None or feels_padding(base.model.config):
        return {}
    shared = shared_prefixes(base.model.config, requests)
    rotary = regimes(base.model)
    if rotary is not None and any(rotary.crosses(shared.get(row, 0), len(prompt)) for row, prompt in requests):
        return {}
    return shared


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
    """The text of generated tokens, without the reasoning before an answer, which a prompt may have begun.

    Where the tokenizer has a token of `<think>`, other tokens that read so are text.
    """
    read = base.tokenizer
    text = str(read.decode([*tokens], skip_special_tokens=True))
    if _opens(base) and str(read.decode([*prompt[-8:]])).rstrip().endswith(THINK):
        return answer_of(THINK + text).strip()
    tag = read.get_added_vocab().get(THINK) if THINK in text else None
    return (text if tag is not None and tag not in tokens else answer_of(text)).strip()


def _opens(base: Base) -> bool:
    """Whether the template may end a prompt with the tag of reasoning, and not only who asks."""
    return base.prompt is None or filled(base.prompt.template, base.tokenizer).opens
