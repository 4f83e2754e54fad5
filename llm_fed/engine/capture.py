"""Captured passes: on a GPU a micro-batch is laid out into static memory, and its forward and backward pass is
replayed as one CUDA graph, so that the host launches one graph instead of thousands of kernels. Elsewhere the pass
itself runs again on the same static memory, which gains nothing and lets tests hold what a GPU would do.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.end_to_end import FlatBatch
from llm_fed.engine.examples import TextBatch
from llm_fed.engine.masks import not_captured
from llm_fed.engine.memory import Static, out_of_memory
from llm_fed.engine.packing import Grid
from llm_fed.engine.passes import PassInputs, one_pass, widened
from llm_fed.method.requests import Fit
from llm_fed.models.rotary import context

log = logging.getLogger(__name__)

USES = 2  # of a shape before it is captured, which costs the host about as much as running it twice
SHAPES = 64  # of which a pass has static memory
STAGES = 2  # banks that are kept with their graphs: methods with two structures train them by turns

Replay = Callable[[], None]


class Captures:
    """Static memory and graphs of one base, for all engines that share it. `said`: why passes have run as they are
    written, one line for each reason. `answers`: whether steps of answers can be captured, as far as is known."""

    def __init__(self) -> None:
        self.said: dict[str, None] = {}
        self.answers = True
        self._stages: dict[Hashable, CapturedPass] = {}

    def passes(self, model: AdaptedModel, jobs: Sequence[Fit], trained: str) -> CapturedPass:
        """Those of these jobs."""
        dtype = jobs[0].start.row.dtype
        key = id(model.model), model.structure, model.autocast, type(model.examples), dtype, trained, model.fuses
        stage = self._stages.pop(key, None)
        if stage is None or len(stage.losses) < len(jobs):
            stage = CapturedPass(self, model, model.bank(len(jobs), dtype, trained))
        self._stages[key] = stage  # the last one used is the last to go
        while len(self._stages) > STAGES:
            self._stages.pop(next(iter(self._stages)))
        lengths = (model.examples.length(job.examples[index]) for job in jobs for b in job.batches for index in b)
        stage.longest = max(lengths, default=0)
        return stage

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


class Recorder:
    """Runs work over static memory: what comes more than USES times is captured, and replayed from then on. `why`:
    nothing is captured any more, as something could not be; else empty. `what`: is captured, in words."""

    def __init__(self, captures: Captures, device: torch.device, what: str):
        self._captures, self._device, self._what = captures, device, what
        self._graphs, self.why = captures.graphs(device), ""
        self._uses, self._replays = Counter[Hashable](), dict[Hashable, Replay]()

    def run(self, key: Hashable, work: Replay) -> bool:
        """The work that is always the same for this key; whether it was replayed."""
        self._uses[key] += 1
        if self._uses[key] > USES and not (key in self._replays or self.why):
            self._capture(key, work)
        if replay := self._replays.get(key):
            replay()
        elif self._uses[key] == USES:
            self._graphs.warm(work)
        else:
            work()
        return replay is not None

    def forget(self, key: Hashable) -> None:
        self._replays.pop(key, None)
        del self._uses[key]

    def _capture(self, key: Hashable, work: Replay) -> None:
        """Where it cannot be captured, all graphs give their memory back."""
        from accelerate.utils.memory import clear_device_cache

        try:
            self._replays[key] = self._graphs.capture(work)
            return
        except Exception as error:
            why = "memory does not suffice" if out_of_memory(error) else " ".join(str(error).split())[:200]
        self.why = f"{self._what} are not captured: {why}"
        self._captures.say(self.why)
        self._replays.clear()
        self._graphs = self._captures.graphs(self._device)
        clear_device_cache(garbage_collection=True)


class CapturedPass:
    """A bank with static memory around it.

    Attributes:
        grid: of the shapes of micro-batches.
        losses: (K,) what the passes of a step add to.
        longest: tokens of the longest text that a fit has.
        recorder: says why nothing is captured any more, where that is so.
    """

    def __init__(self, captures: Captures, model: AdaptedModel, bank: AdapterBank):
        self.model, self.bank = model, bank
        device, num_rows = model.device, len(bank.rows)
        self.losses, self.longest = torch.zeros(num_rows, device=device), 0
        self.grid = Grid(context(model.model.config) if isinstance(model.model, PreTrainedModel) else None)
        self.recorder = Recorder(captures, device, "training passes")
        self._shapes: dict[Hashable, Static[PassInputs]] = {}
        self._masks = torch.zeros(0, dtype=torch.bool, device=device)

    def take(self, inputs: PassInputs, seeds: Sequence[int], sizes: Sequence[int]) -> bool:
        """Pass over a micro-batch of the host; whether it was replayed. `seeds`, `sizes`: of its dropout masks."""
        wide = widened(inputs, self.grid, self.longest)
        key, static = self._shape(wide)
        static.fill(wide)
        if self.bank.drops:
            self.bank.draw_masks(seeds, sizes, out=static.item.masks, end_to_end=wide.groups is not None)
        return self.recorder.run(key, partial(one_pass, self.model, self.bank, static.item, self.losses))

    def _shape(self, wide: PassInputs) -> tuple[Hashable, Static[PassInputs]]:
        """What is the same in all micro-batches that have its memory, and the memory."""
        batch, groups = wide.batch, wide.groups
        assert isinstance(batch, TextBatch)
        rows, tokens = batch.input_ids.shape
        key: Hashable = rows, tokens, len(wide.owner), wide.weights.dtype
        if isinstance(batch, FlatBatch) and groups is not None:
            key = key, len(groups.ends), len(batch.sequences.borders), batch.sequences.longest
        static = self._shapes.pop(key, None)
        if static is None:
            static = Static(wide, self.losses.device)
            if self.bank.drops:
                static.item = replace(static.item, masks=self._masks_of(rows, tokens))
        self._shapes[key] = static  # the last one used is the last to go
        while len(self._shapes) > SHAPES:
            self._shapes.pop(oldest := next(iter(self._shapes)))
            self.recorder.forget(oldest)
        return key, static

    def _masks_of(self, rows: int, tokens: int) -> Tensor:
        """(N, T, D) of the memory that all shapes share, as one pass ends before the next begins."""
        size = rows * tokens * self.bank.width
        if len(self._masks) < size:  # graphs that were captured keep the memory that they know
            self._masks = torch.zeros(size, dtype=torch.bool, device=self._masks.device)
        return self._masks[:size].view(rows, tokens, self.bank.width)


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
        self._pool: torch.cuda._POOL_HANDLE | None = None

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
