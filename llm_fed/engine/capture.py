"""Captured passes: on a GPU a micro-batch is laid out into static memory, and its forward and backward pass is
replayed as one CUDA graph, so that the host launches one graph in the place of thousands of kernels. Elsewhere the pass
itself runs again on the same static memory, which gains nothing and lets tests hold what a GPU would do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.engine import end_to_end
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.laid import Laid, Static
from llm_fed.engine.masks import not_captured
from llm_fed.engine.memory import out_of_memory
from llm_fed.engine.packing import Grid, repeated, widened
from llm_fed.engine.passes import one_pass
from llm_fed.engine.ways import ANSWERED, untried
from llm_fed.merge.delta import under
from llm_fed.method.requests import Fit
from llm_fed.models.rotary import context, regimes

log = logging.getLogger(__name__)

USES = 2  # of a shape before it is captured, which costs the host about as much as running it twice
SHAPES = 64  # of which a stage has static memory
STAGES = 2  # banks that are kept with their graphs: methods with two structures train them by turns

Replay = Callable[[], None]


class Captures:
    """Static memory and graphs of one base, for all fits of an engine, or of several that share it.

    Attributes:
        forced: also answers of bases whose like no GPU has run so are captured.
        said: why passes have run as they are written, one line for each reason.
        answers: whether steps of answers can be captured, as far as is known.
    """

    def __init__(self, forced: bool = True) -> None:
        self.forced = forced
        self.said: dict[str, None] = {}
        self.answers = True
        self._stages: dict[Hashable, Stage] = {}

    def begin(self, *, forced: bool) -> None:
        """A run, which says for itself what is not captured, and tries it."""
        self.forced, self.answers = forced, True
        self.said.clear()

    def stage(self, model: AdaptedModel, jobs: Sequence[Fit], trained: str) -> Stage | None:
        """Where these jobs train; None where their passes cannot be captured."""
        if why := refusal(model, jobs):
            self.say(f"training passes are not captured: {why}")
            return None
        dtype = jobs[0].start.row.dtype
        key = id(model.model), model.structure, model.autocast, type(model.examples), dtype, trained, model.fuses
        stage = self._stages.pop(key, None)
        if stage is None or len(stage.losses) < len(jobs):
            stage = Stage(self, model, len(jobs), dtype, trained)
        self._stages[key] = stage  # the last one used is the last to go
        while len(self._stages) > STAGES:
            self._stages.pop(next(iter(self._stages)))
        return stage

    def of_answers(self, model: nn.Module) -> Captures | None:
        """These, where steps of this base's answers are captured."""
        return None if self.untried_answers(model) else self

    def untried_answers(self, model: nn.Module) -> str:
        """Why steps of this base's answers are not captured, unless that is forced; empty where they are."""
        return "" if self.forced else untried(model, ANSWERED)

    def graphs(self, device: torch.device) -> Graphs:
        """With a pool of their own."""
        return CudaGraphs(device) if device.type == "cuda" else Graphs()

    def say(self, why: str) -> None:
        if why not in self.said:
            self.said[why] = None
            log.warning("%s", why)

    def clear(self) -> None:
        """Give back all memory."""
        self._stages.clear()


def refusal(model: AdaptedModel, jobs: Sequence[Fit]) -> str:
    """Why the passes of these jobs cannot be captured; empty where they can."""
    for why, holds in {
        "teachers answer for each example": bool(jobs[0].teachers),
        "a method's own loss may ask the device for values": any(callable(job.loss) for job in jobs),
        "frozen weights lie beneath the adapters": any(under(job.start) for job in jobs),
    }.items():
        if holds:
            return why
    return never(model, private=jobs[0].private is not None)


def never(model: AdaptedModel, *, private: bool) -> str:
    """Why no passes of such fits can be captured, whatever a method asks for; empty where some can."""
    for why, holds in {
        "only texts have batches of fixed shapes so far": not model.examples.fixed,
        "gradients of single examples are asked for": private,
        "the base's positions depend on the length of each text": regimes(model.model) is not None,
        "the base lies on several devices": len(set(getattr(model.model, "hf_device_map", {}).values())) > 1,
    }.items():
        if holds:
            return why
    return ""


def in_words(
    captures: Captures | None, device: torch.device, *, adapters: bool, untried: str = "", answers: str = ""
) -> str:
    """How the passes of a run are computed, where that is no matter of course: for people.

    Args:
        adapters: whether these are trained, and not whole models.
        untried: as of `ways.untried`.
        answers: as of `untried_answers`.
    """
    if captures is None:
        said = f"as they are written, as {untried}; engine.capture, padding_free and fused may be on"
        return said if untried and adapters and device.type == "cuda" else ""
    if not adapters:
        return "as they are written: whole models are not captured (engine.capture)" if captures.forced else ""
    if device.type == "cuda":
        but = f"; answers are written as without, as {answers}" if answers else ""
        return f"captured as CUDA graphs, where they can be (engine.capture){but}"
    return f"in fixed shapes (engine.capture=on), which gains nothing on {device}"


@dataclass
class Slot:
    """The micro-batches of one shape."""

    static: Static[Laid]
    uses: int = 0
    replay: Replay | None = None
    never: bool = False  # whether memory does not suffice to capture it


class Stage:
    """A bank with static memory around it.

    Attributes:
        losses: (K,) what the passes of a step add to.
        longest: tokens of the longest text that a fit has.
        grid: of the shapes of micro-batches.
        why: some micro-batches of whatever shape cannot be replayed; empty where all can.
    """

    def __init__(self, captures: Captures, model: AdaptedModel, num_rows: int, dtype: torch.dtype, trained: str):
        self.bank = model.bank(num_rows, dtype, trained)
        self.losses, self.longest = torch.zeros(num_rows, device=model.device), 0
        self.scales = torch.ones(num_rows, device=model.device)
        config = getattr(model.model, "config", None)
        self.grid = Grid(None if config is None else context(config))
        self._captures, self._model, self._slots = captures, model, dict[Hashable, Slot]()
        self._masks = torch.zeros(0, dtype=torch.bool, device=model.device)
        self._graphs = self._new_graphs()
        self._barred, self.why = False, ""  # whether nothing can be captured

    def begin(self, scales: Tensor | None) -> None:
        """A step, in float16 with the scale of each client's loss."""
        self.losses.zero_()
        if scales is not None:
            self.scales[: len(scales)].copy_(scales)

    def take(self, laid: Laid, seeds: Sequence[int], sizes: Sequence[int]) -> bool:
        """The pass over a micro-batch; whether it was replayed.

        Args:
            laid: on the host.
            seeds, sizes: of the rows' dropout masks.
        """
        flat = laid.groups is not None
        wide = _flat_widened(laid, self.grid, self.longest) if flat else _widened(laid, self.grid)
        slot = self._slot(wide)
        slot.static.fill(wide)
        if self.bank.drops:
            self.bank.draw_masks(seeds, sizes, out=slot.static.laid.masks, end_to_end=flat)
        slot.uses += 1
        if slot.replay is None and slot.uses > USES and not (slot.never or self._barred):
            slot.replay = self._captured(slot)
        if slot.replay is not None:
            slot.replay()
        elif slot.uses == USES:
            self._graphs.warm(partial(self._run, slot.static.laid))
        else:
            self._run(slot.static.laid)
        return slot.replay is not None

    def _run(self, laid: Laid) -> None:
        scales = self.scales if self._model.autocast == torch.float16 else None
        one_pass(self._model, self.bank, laid, scales, self.losses)

    def _slot(self, wide: Laid) -> Slot:
        rows, tokens = wide.batch.input_ids.shape
        key: Hashable = rows, tokens, len(wide.owner), wide.weights.dtype
        if wide.groups is not None:
            sequences = wide.batch.sequences
            key = key, len(wide.groups.ends), len(sequences.borders), sequences.longest
        slot = self._slots.pop(key, None)
        if slot is None:
            static = Static(wide, self.losses.device)
            if self.bank.drops:
                static.laid = replace(static.laid, masks=self._masks_of(rows, tokens))
            slot = Slot(static)
        self._slots[key] = slot  # the last one used is the last to go
        while len(self._slots) > SHAPES:
            self._slots.pop(next(iter(self._slots)))
        return slot

    def _masks_of(self, rows: int, tokens: int) -> Tensor:
        """(N, T, D) of the memory that all shapes share, as one pass ends before the next begins."""
        size = rows * tokens * self.bank.width
        if len(self._masks) < size:  # graphs that were captured keep the memory that they know
            self._masks = torch.zeros(size, dtype=torch.bool, device=self._masks.device)
        return self._masks[:size].view(rows, tokens, self.bank.width)

    def _captured(self, slot: Slot) -> Replay | None:
        try:
            return self._graphs.capture(partial(self._run, slot.static.laid))
        except Exception as error:
            self._forget()
            if out_of_memory(error):
                self.why = "memory does not suffice for all captured passes; some run as they are written"
                slot.never = True
            else:
                text = " ".join(str(error).split())[:200]
                self.why = f"training passes are not captured, as what they call does not allow it: {text}"
                self._barred = True
            self._captures.say(self.why)
            return None

    def _forget(self) -> None:
        """Give back the memory of all graphs. Their shapes may be captured again."""
        from accelerate.utils.memory import clear_device_cache

        for slot in self._slots.values():
            slot.replay, slot.uses = None, 0
        self._graphs = self._new_graphs()
        clear_device_cache(garbage_collection=True)

    def _new_graphs(self) -> Graphs:
        return self._captures.graphs(self.losses.device)


class Graphs:
    """Captures passes where there are no graphs: what is replayed is the pass itself."""

    def warm(self, run: Replay) -> None:
        """The last run of a pass before it is captured."""
        run()

    def capture(self, run: Replay) -> Replay:
        """What replays a pass, which does not run here; RuntimeError where it cannot be captured."""
        return run


class CudaGraphs(Graphs):
    """Graphs of a GPU, which need not be torch's current one. They share a pool of memory, which torch does not take
    any more once all of its graphs have died."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def warm(self, run: Replay) -> None:
        """On a stream of its own, as torch wants it: some libraries prepare themselves for each stream."""
        with torch.cuda.device(self._device):
            now, beside = torch.cuda.current_stream(), torch.cuda.Stream()
            beside.wait_stream(now)
            with torch.cuda.stream(beside):
                run()
            now.wait_stream(beside)

    def capture(self, run: Replay) -> Replay:
        with torch.cuda.device(self._device):
            now, draws = torch.cuda.current_stream(), torch.cuda.default_generators[torch.cuda.current_device()]
            before = draws.clone_state()
            try:
                graph = torch.cuda.CUDAGraph()
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                with torch.cuda.graph(graph, pool=self._pool), not_captured():
                    run()
            except BaseException as error:
                # Torch stays on the stream of a capture that fails at its end, and its random numbers in the capture;
                # the pool takes no further graph.
                torch.cuda.set_stream(now)
                draws.graphsafe_set_state(before)
                self._pool = None
                if (first := error.__context__) is not None and out_of_memory(first):
                    raise first from None  # ending the capture has failed in its turn
                raise
        return graph.replay


def _widened(laid: Laid, grid: Grid) -> Laid:
    """A micro-batch on the host in a shape of the grid; further targets weigh nothing."""
    batch = widened(laid.batch, grid)
    rows, tokens = batch.input_ids.shape
    wide = _with_targets(laid, len(batch.labels))
    mix = None if laid.mix is None else repeated(laid.mix, rows)
    return replace(wide, batch=batch, index=repeated(laid.index, rows), into=repeated(laid.into, rows), mix=mix)


def _flat_widened(laid: Laid, grid: Grid, longest: int) -> Laid:
    """The same of one whose examples lie end to end; further tokens belong to its last client."""
    batch, groups = end_to_end.widened(laid.batch, grid, longest), laid.groups
    assert groups is not None
    tokens = batch.input_ids.shape[1]
    ends = groups.ends.clone()
    ends[-1] = tokens
    groups = replace(groups, ends=ends, of=repeated(groups.of, tokens), known=None)
    mix = None if laid.mix is None else repeated(laid.mix, tokens)
    return replace(_with_targets(laid, len(batch.labels)), batch=batch, groups=groups, mix=mix)


def _with_targets(laid: Laid, targets: int) -> Laid:
    weights = torch.nn.functional.pad(laid.weights, (0, targets - len(laid.weights)))
    return replace(laid, owner=repeated(laid.owner, targets), weights=weights, owners=())
