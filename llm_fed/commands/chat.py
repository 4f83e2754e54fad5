"""A conversation with personal adapters in a terminal: whose is chosen by `/client`, and `/base` is the base alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from llm_fed import kinds
from llm_fed.basics.errors import UserError, printable, require
from llm_fed.basics.terminal import Lasting
from llm_fed.engine.continuous import Sampling as Sampling
from llm_fed.export.load import load_client
from llm_fed.export.origins import as_trained, read_origin
from llm_fed.export.personal import Personal, alone
from llm_fed.kinds.language import Language, load_base
from llm_fed.models.prompt import Prompt, prompt_for
from llm_fed.runs.reading import exported, read_config
from llm_fed.runtime.launch import choose_device
from llm_fed.settings.configfile import from_dict, overlay
from llm_fed.tasks.control import without_surrogates

HELP = """\
/client        list the clients
/client NAME   switch to this client's adapter
/base          switch to the base without an adapter
/reset         start a new conversation
/system TEXT   start a new conversation with this system prompt; without TEXT, with none
/quit          quit (as does Ctrl-D); Ctrl-C stops an answer
Anything else is a prompt."""


@dataclass
class Chat:
    """Whose model answers, and what was said so far."""

    base: Language  # without what any adapter's folder says; with what its own says, if an adapter was folded into it
    adapters: dict[str, Path]  # by client the folder of its adapter; the first one begins
    template: str | None = None  # instead of those that the folders say
    most: int | None = None  # tokens of an answer, instead of what the folders say
    client: str | None = None  # None: the base alone
    sampling: Sampling | None = None  # None: answers are greedy, as they were scored
    system: str = ""  # a system prompt; empty: none but what the template brings
    said: list[dict[str, str]] = field(default_factory=list)
    _model: Personal = field(init=False)
    _prompt: Prompt | None = field(init=False, default=None)  # of the adapter, and afterwards of the base, too

    def __post_init__(self) -> None:
        self.choose(self.client)

    def choose(self, client: str | None) -> None:
        """Go on with a client's adapter, or with the base alone; the conversation begins anew. UserError: there is no
        such client, or its adapter cannot be read."""
        if client is None:
            usual = "chat" if self.base.tokenizer.chat_template else None
            self._prompt = self._prompt or self.base.prompt or self._of_template(usual)
            self._model = alone(replace(self.base, prompt=self._prompt))
        else:
            client = require("/client", client, self.adapters)
            model = load_client(self.adapters[client], self.base)
            self._prompt = (None if self.template else model.base.prompt) or self._of_template(None)
            self._model = replace(model, base=replace(model.base, prompt=self._prompt))
        self.client, self.said = client, []

    def _of_template(self, usual: str | None) -> Prompt | None:
        """With the template that was given, else the usual one, else alpaca-short."""
        return self.base.prompt_of(from_dict({"task": {"template": self.template or usual or "alpaca-short"}}))

    @property
    def remembers(self) -> bool:
        """Whether the template takes a conversation; the others take one prompt, as in training."""
        assert self._prompt is not None
        return self._prompt.template.date is not None

    def reply(self, text: str) -> Iterator[str]:
        """The answer to a prompt in pieces; an answer that is broken off is forgotten, with its prompt."""
        self.said.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._model.reply(self._asked(text), max_new_tokens=self.most, sampling=self.sampling):
                answer += piece
                yield piece
        except BaseException:
            self.said.pop()
            raise
        self.said.append({"role": "assistant", "content": answer})

    def _asked(self, text: str) -> str | list[dict[str, str]]:
        """What the model is given: the conversation so far, or this prompt alone, behind the system prompt."""
        if not self.remembers and not self.system:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + (self.said if self.remembers else [{"role": "user", "content": text}])

    @property
    def greeting(self) -> str:
        """Who answers, and how prompts are put."""
        assert self._prompt is not None
        who = f"{self.client}'s adapter on {self.base.name}" if self.client else f"{self.base.name} alone"
        how = f"template {self._prompt.template.name}"
        drawn = f"; answers are sampled ({self.sampling}), and scores are of greedy ones" if self.sampling else ""
        system = "; with a system prompt" if self.system else ""
        return f"{who}; {how}" + ("" if self.remembers else "; each prompt is answered on its own") + system + drawn


def of_run(folder: Path, client: str | None) -> Chat:
    """With the adapters of a finished run, beginning with `client`, or else the first one. UserError: it has none, or
    they are of image models, or the client is not among them."""
    config = read_config(folder)
    kinds.check_writes(
        config, f"{folder} trained {{noun}}s, which cannot chat; load_client or load_image_model loads them"
    )
    adapters = exported(folder)
    first = next(iter(adapters)) if client is None else require("--client", client, adapters)
    return Chat(load_base(config.base, choose_device(config.device)), adapters, client=first)


def of_base(name: str, adapter: Path | None, template: str | None, dtype: str | None) -> Chat:
    """With a base, and an adapter's folder if there is one; the base is loaded as when the adapter was trained, but for
    a `dtype`. UserError: one of them cannot be loaded."""
    config = from_dict({"base": {"name": name, "dtype": dtype or "float32"}})
    config = overlay(config, [f"task.template={template}"] if template else [], "--base")
    origin = adapter or Path(os.path.expanduser(name))  # or a base with an adapter folded in
    keys = ["base.dtype"] if dtype else []
    base = load_base(as_trained(config.base, read_origin(origin), keys, _note), choose_device(config.device))
    if adapter is None and template is None:
        base = replace(base, prompt=prompt_for(base, origin))
    folders = {adapter.resolve().name: adapter} if adapter else {}
    return Chat(base, folders, template and config.task.template, client=next(iter(folders), None))


def talk(chat: Chat, ask: Callable[[str], str], *, shows_help: bool) -> None:
    """Prompts and commands from `ask` until it raises EOFError; answers go to standard output as they come. `ask`:
    given what stands before the cursor, the next line. `shows_help`: whether somebody sits there who wants to know what
    can be done."""
    _note(f"{chat.greeting}." + (f"\n{HELP}" if shows_help else ""))
    while True:
        try:
            line = ask(printable(f"{chat.client or 'base'}> ")).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        word, _, rest = line.partition(" ")
        try:
            if word == "/quit":
                return
            if word == "/base" or (word == "/client" and rest):
                chat.choose(rest.strip() if word == "/client" else None)
                _note(f"{chat.greeting}.")
            elif word == "/client":
                _note(", ".join(chat.adapters) or "there are no adapters, only the base")
            elif word == "/system":
                chat.system = rest.strip()
                chat.said.clear()
                _note("A new conversation begins" + (" with this system prompt." if chat.system else "."))
            elif word == "/reset":
                chat.said.clear()
                _note("A new conversation begins.")
            elif word.startswith("/"):
                _note(f"{word} is not a command.\n{HELP}" if word != "/help" else HELP)
            elif line:
                _say(chat, line)
                if isinstance(sys.stdout, Lasting) and sys.stdout.reader_left:
                    return
        except UserError as error:
            _note(str(error))


def _say(chat: Chat, text: str) -> None:
    if without_surrogates(text) != text:
        text = without_surrogates(text)
        _note("A half of a character (a lone surrogate) is read as U+FFFD.")
    pieces, empty = chat.reply(text), True
    try:
        for piece in pieces:
            empty = False
            # What a model says must not steer the terminal.
            shown = "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in piece)
            print(shown, end="", flush=True)
        print(flush=True)
        if empty:
            _note("The answer is empty: it ended at once, or its reasoning did not end (see --max-new-tokens).")
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print()
        _note("The answer was stopped and discarded.")


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
