"""What an exported adapter's folder says of its prompts: the template, the tokens that end an answer, and the most
tokens of one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from llm_fed.basics import checksum
from llm_fed.basics.documents import load_json
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import read_file
from llm_fed.models.base import Base
from llm_fed.models.loading import end_tokens
from llm_fed.models.origin import Origin
from llm_fed.settings import plugins
from llm_fed.tasks.common import Template
from llm_fed.tasks.templates import filled, template_of

FILE = "prompt.json"
ORIGIN = "base"  # the key of the base in it, see `export.origins`


@dataclass(frozen=True)
class Prompt:
    """How a prompt becomes the tokens that an answer follows, and where the answer ends."""

    template: Template
    stop: tuple[int, ...]  # ids of the tokens that end an answer
    max_new_tokens: int
    origin: Origin | None = field(default=None, compare=False)  # the base that the folder names

    def as_json(self, tokenizer: PreTrainedTokenizerBase, origin: Origin) -> bytes:
        """The file's content. `stop_tokens` is for people. `origin`: the base, which lies in it as well."""
        text, date = self.template.text, self.template.date
        values = {
            "template": self.template.name,
            **({"text": text} if date is None else {"chat_template": text, "date_string": date}),
            "stop_tokens": tokenizer.convert_ids_to_tokens(list(self.stop)),
            "stop_token_ids": list(self.stop),
            "max_new_tokens": self.max_new_tokens,
            ORIGIN: origin.as_json(),
        }
        return json.dumps(checksum.added(values), indent=2, ensure_ascii=False).encode()


def stops(base: Base, template: Template) -> tuple[int, ...]:
    """Every token that ends an answer: the base's, and the one with which the template ends a turn."""
    return tuple(sorted({id for id in stop_tokens(base) if id is not None} | {*filled(template, base.tokenizer).ends}))


def prompt_for(base: Base, folder: Path) -> Prompt | None:
    """What an adapter's folder says of its prompts, to put them so to its base. NotAllowed: it brings a chat template
    of its own, which is a program, and the user does not trust it. UserError: as of `read_prompt`."""
    found = read_prompt(folder)
    if found is not None and found.template.date is not None:
        raw = base.tokenizer.chat_template
        if not raw or found.template.text not in (raw, template_of("chat", base.tokenizer).text):
            plugins.check_brought(folder / FILE, "a chat template that is not its base's, which is a program", FILE)
    return found


def read_prompt(folder: Path) -> Prompt | None:
    """What an adapter's folder says of its prompts; None where it says nothing. UserError: the file is damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        values = load_json(read_file(path))
        stop, most = values["stop_token_ids"], values["max_new_tokens"]
        if "chat_template" in values:
            template = Template(values["template"], values["chat_template"], values["date_string"])
        else:
            template = Template(values["template"], values["text"])
            if "{prompt}" not in template.text:
                raise ValueError("its text has no {prompt}")
        texts = (template.name, template.text, "" if template.date is None else template.date)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("template, text, chat_template and date_string are texts")
        if not (isinstance(stop, list) and stop and all(type(id) is int and id >= 0 for id in stop)):
            raise ValueError("stop_token_ids is a list of token ids")
        if not (type(most) is int and most >= 1):
            raise ValueError("max_new_tokens is a number of at least 1")
        origin = Origin.from_json(values[ORIGIN]) if ORIGIN in values else None
        checksum.checked(values)  # last, so that what is wrong is said where it can be
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged: {reason}; export the adapter again, or delete the "
            "file (if you changed it on purpose, delete its checksum)"
        ) from error
    return Prompt(template, tuple(stop), most, origin)


def stop_tokens(base: Base) -> set[int]:
    """Every token that ends an answer: those of an adapter's folder, or the tokenizer's EOS and the base's."""
    if base.prompt is not None:
        return set(base.prompt.stop)
    return end_tokens(base.tokenizer, base.model.generation_config.eos_token_id)
