"""What the runs of one command make of the same data, made once: the rows of the last task, and of each example its
length and its tokens. The runs of a comparison differ in methods and seeds, and have most of their examples in common.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from llm_fed import tasks
from llm_fed.engine.capture import Captures
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import Example, TaskData
from llm_fed.tasks.record import Record

MOST = 2**28  # bytes of packed examples; what comes later is made anew each time
_ENTRY = 200  # bytes that an entry takes beside what is packed
Made = TypeVar("Made")


class Reuse:
    """Kept with a base, hence with its tokenizer. What it takes does not grow with the number of runs.

    Attributes:
        captures: of training passes, for the engines of all runs.
    """

    def __init__(self) -> None:
        self._settings: dict[Hashable, int] = {}
        self._packed: dict[bytes, bytes] = {}
        self._bytes = 0
        self._task: tuple[Hashable, TaskData] | None = None
        self.captures = Captures()

    def task(self, config: TaskConfig, seed: int, held_out: int, known: Record | None, *, absent: bool) -> TaskData:
        """See `tasks.load`. Read again with other settings or seeds, and for a run that knows rows of its own."""
        if known is not None:
            return tasks.load(config, seed, held_out, known, absent=absent)
        asked = config, seed, held_out, absent
        if self._task is None or self._task[0] != asked:
            self._task = None  # so that never two are in memory
            self._task = asked, tasks.load(config, seed, held_out, absent=absent)
        return self._task[1]

    def under(self, *settings: Hashable) -> EncodingMemo:
        """What is made of examples under settings: all that it depends on, but the tokenizer."""
        return EncodingMemo(self, self._settings.setdefault(settings, len(self._settings)).to_bytes(4, "little"))

    def get(self, key: bytes) -> bytes | None:
        return self._packed.get(key)

    def keep(self, key: bytes, packed: bytes) -> None:
        if self._bytes < MOST:
            self._packed[key] = packed
            self._bytes += len(packed) + _ENTRY


class EncodingMemo:
    """What was made of examples under some settings."""

    def __init__(self, reuse: Reuse, settings: bytes):
        self._reuse, self._settings = reuse, settings

    def made(self, what: str, example: Example, make: Callable[[], Made]) -> Made:
        """What `make` returns, which depends on what is asked for, on the example and on the settings alone; in an
        object of the caller's own."""
        packed = self._reuse.get(key := self._key(what, example))
        if packed is not None:
            return pickle.loads(packed)
        made = make()
        self._reuse.keep(key, pickle.dumps(made, pickle.HIGHEST_PROTOCOL))
        return made

    def all(
        self, what: str, examples: Sequence[Example], make: Callable[[list[Example]], Iterable[Made]]
    ) -> list[Made]:
        """The same of several examples; `make` is given those together of which nothing is kept."""
        keys = [self._key(what, example) for example in examples]
        packed = [self._reuse.get(key) for key in keys]
        new = [place for place, known in enumerate(packed) if known is None]
        made = dict(zip(new, make([examples[place] for place in new]), strict=True))
        for place, each in made.items():
            self._reuse.keep(keys[place], pickle.dumps(each, pickle.HIGHEST_PROTOCOL))
        return [made[place] if known is None else pickle.loads(known) for place, known in enumerate(packed)]

    def _key(self, what: str, example: Example) -> bytes:
        content = repr((what, example)).encode()
        return hashlib.blake2b(content, digest_size=16, key=self._settings).digest()
