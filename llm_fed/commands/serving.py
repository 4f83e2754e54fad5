"""The models of a server, and the thread in which they answer: whoever asks, all rows are written together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from llm_fed import kinds
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.continuous import LiveAnswer, RunningBatch, Sampling
from llm_fed.engine.generation import most_rows, room_after
from llm_fed.experiment.rounds import opened
from llm_fed.export.load import load_client
from llm_fed.export.personal import Conversation, Personal, alone
from llm_fed.kinds.language import Language, load_base
from llm_fed.models.lora import Lora
from llm_fed.models.prompt import stop_tokens
from llm_fed.models.rotary import context
from llm_fed.runs.checkpoint import Place
from llm_fed.runs.reading import exported, read_config
from llm_fed.runtime.launch import choose_device
from llm_fed.settings.config import Config
from llm_fed.tasks.control import without_surrogates

BASE = "base"  # the model without an adapter


class Busy(Exception):
    """As many requests wait as may."""


@dataclass(frozen=True)
class Wanted:
    """What a request wants of an answer."""

    most: int | None = None  # tokens; None: as the model's folder says
    sampling: Sampling | None = None  # None: greedy, as scored
    likeliest: int | None = None  # alternatives to each token, with log-probabilities; None: none are told


@dataclass(frozen=True)
class Served:
    """A model with a name."""

    personal: Personal
    batch: int  # of the server
    row: int  # of the bank of that batch


class ModelServer:
    """The personal models of one or several runs of one base, and the base alone, by name (`models`). `waiting`:
    answers that no batch has taken in yet, by batch."""

    def __init__(self, base: Language, models: Mapping[str, Personal], rows: int, queue: int):
        """`rows` of a batch at most, and at most `queue` answers that wait."""
        self.base, self._queue, self._ends = base, queue, False
        groups: dict[Lora, list[tuple[str, Personal]]] = {}
        for name, personal in models.items():
            groups.setdefault(personal.structure, []).append((name, personal))
        self.models, self._batches = dict[str, Served](), list[RunningBatch]()
        for structure, members in groups.items():
            bank = base.engine().adapted(structure).bank_of([personal.state for _, personal in members])
            for row, (name, personal) in enumerate(members):
                self.models[name] = Served(personal, len(self._batches), row)
            self._batches.append(RunningBatch(base, bank, rows))
        self.waiting = [deque[LiveAnswer]() for _ in self._batches]
        self._news = threading.Condition()
        self.failure: RunError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="answers")
        self._thread.start()

    @property
    def load(self) -> dict[str, int]:
        """How many answers are written, and how many wait."""
        return {"running": sum(len(batch.rows) for batch in self._batches), "waiting": sum(map(len, self.waiting))}

    def prompt(self, name: str, given: str | Conversation) -> list[int]:
        """The tokens of a conversation, put as the model was trained, or of a text as it stands. UserError: the model's
        template has no place for it, or it is too long."""
        base = self.models[name].personal.base
        if isinstance(given, str):
            tokens = list(base.tokenizer(without_surrogates(given))["input_ids"])
            if len(tokens) > 1 and tokens[-1] == base.tokenizer.eos_token_id:  # some end every text with it
                tokens = tokens[:-1]
        else:
            said = [{**turn, "content": without_surrogates(turn["content"])} for turn in given]
            (tokens,) = base.tokens([said], None)
        if not tokens:
            raise UserError("the prompt has no tokens")
        if room_after(base, len(tokens), 1) < 1:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, and the context of {base.name!r} is "
                f"{context(base.model.config)}; send a shorter one"
            )
        return list(tokens)

    def ask(
        self, name: str, prompt: Sequence[int], wanted: Wanted, heard: Callable[[int | Exception | None], None]
    ) -> LiveAnswer:
        """Begin an answer, of which `heard` is told in another thread. Busy: too many wait."""
        served = self.models[name]
        base = served.personal.base
        most = wanted.most if wanted.most is not None else base.prompt.max_new_tokens
        choose = wanted.sampling.chooser(base.model.device) if wanted.sampling else None
        room = room_after(base, len(prompt), most)
        ends, likeliest = stop_tokens(base), wanted.likeliest
        answer = LiveAnswer(served.row, [*prompt], room, ends, heard, choose=choose, likeliest=likeliest)
        with self._news:
            if self.failure is not None:
                raise self.failure
            if self.load["waiting"] >= self._queue:
                raise Busy
            self.waiting[served.batch].append(answer)
            self._news.notify()
        return answer

    def close(self) -> None:
        """End the thread, and all answers with an error."""
        with self._news:
            self._ends = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                for location, batch in enumerate(self._batches):
                    try:
                        self._advance(location, batch)
                    except Exception as error:  # whatever one batch raises, its answers end and the server goes on
                        batch.fail(error)
        finally:
            self.failure = RunError("the server ends")
            for batch, waiting in zip(self._batches, self.waiting, strict=True):
                batch.fail(self.failure)
                for answer in waiting:
                    answer.heard(self.failure)

    def _wait(self) -> bool:
        """Until there is something to do; False at the end."""
        with self._news:
            while not (self._ends or any(self.load.values())):
                self._news.wait()
            return not self._ends

    def _advance(self, location: int, batch: RunningBatch) -> None:
        """Take in what waits, and write one token of each row."""
        again = batch.step() if batch.rows else []
        with self._news:
            waiting = self.waiting[location] = deque(
                each for each in [*again, *self.waiting[location]] if not each.stopped
            )
            new = batch.takes(list(waiting))
            for answer in new:
                waiting.remove(answer)
        if new:
            members = [served.personal for served in self.models.values() if served.batch == location]
            try:
                for answer in new:
                    own = members[answer.row]
                    answer.mix = self.base.mixing_weights(own.structure, [(own.state, answer.text)])
                again = batch.read(new)
            except Exception as error:
                for answer in new:
                    answer.heard(error)
                raise
            with self._news:
                self.waiting[location].extendleft(reversed(again))


def of_runs(locations: Sequence[str], queue: int) -> ModelServer:
    """A server of RUN, RUN@ROUND and RUN@best: their clients by name, of a round as `client@round`. UserError: they
    have no adapters, are not of language models, or not of one base."""
    with ExitStack() as stack:
        configs: list[Config] = []
        folders: dict[str, Path] = {}
        for text in locations:
            location = Place.parse(text)
            view = stack.enter_context(opened(text, everybody=True, latest=True))
            configs.append(read_config(view))
            kinds.check_writes(configs[-1], f"{text} trained {{noun}}s, which write no answers")
            suffix = "" if location.round is None else f"@{location.round}"
            new = {f"{client}{suffix}": folder for client, folder in exported(view).items()}
            if both := next((name for name in new if name in folders or name == BASE), None):
                raise UserError(f"two models are called {both!r}; serve these runs on two ports")
            folders |= new
        if any(each.base != configs[0].base for each in configs):
            raise UserError("the runs are of different bases; serve each on a port of its own")
        base = load_base(configs[0].base, choose_device(configs[0].device))
        models = {name: load_client(folder, base) for name, folder in folders.items()}
    for name, personal in models.items():
        if personal.base.prompt is None:
            raise UserError(f"the adapter of {name} has no prompt.json; export it again")
    return ModelServer(
        base, {**models, BASE: _base(base, models)}, most_rows(configs[0].eval.batch_size, base.device), queue
    )


def _base(base: Language, models: Mapping[str, Personal]) -> Personal:
    """The base alone, prompted as the first client's model, and in one batch with it where that can be."""
    first = next(iter(models.values()))
    if first.structure.gate == "mix":  # its weights come from the adapter's own memory
        return alone(replace(base, prompt=first.base.prompt))
    return Personal(replace(base, prompt=first.base.prompt), base.draw(first.structure, generator(0)), first.structure)
