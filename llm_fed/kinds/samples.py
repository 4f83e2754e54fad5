"""Sample predictions of texts, for people: prompts with what the template puts around them, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.method.requests import Query
from llm_fed.models.base import Base
from llm_fed.models.prompt import Prompt
from llm_fed.tasks.common import Example, Turn, text_of
from llm_fed.tasks.templates import encode_prompt

_SYSTEM, _USER = "Be brief and polite.", "Which one?"  # by which the template is found


class Shown:
    """Shows predictions of a language model.

    Attributes:
        _known: what the template puts around prompts, found by prompts of which it is known what they are: by whether
            there is a system text, what stands before and behind the prompt.
    """

    def __init__(self, base: Base, said: Prompt):
        self._tokenizer = base.tokenizer
        self._known: dict[bool, tuple[str, str]] = {}
        for system in (False, True):
            turns = [Turn("system", _SYSTEM)] * system + [Turn("user", _USER)]
            with suppress(UserError):  # of a template that takes no system text
                ids = encode_prompt(turns, self._tokenizer, template=said.template)
                before, user, after = str(self._tokenizer.decode(ids, skip_special_tokens=True)).partition(_USER)
                if user and before.count(_SYSTEM) == system:
                    self._known[system] = before.replace(_SYSTEM, "{system}"), after

    def line(self, query: Query, alone: Any, own: Any, example: Example | None) -> dict[str, Any]:
        """A line of `samples.jsonl` about a query, without its client.

        Args:
            alone, own: the predictions of the base and of the personal model.
            example: from which the query was made, where that is known.
        """
        prompt = str(self._tokenizer.decode(query.prompt, skip_special_tokens=True))
        return {
            "prompt": prompt,
            **(self._parts(example, prompt) if example else {}),
            "references": list(query.answers),
            "base": self._text(query, alone),
            "answer": self._text(query, own),
        }

    def _parts(self, example: Example, prompt: str) -> dict[str, str]:
        """The prompt as the data have it (`text`), its system text, if it has one (`system`), and what the template
        puts around both (`template`); nothing where the prompt is not the template with these in it."""
        asked = example.prompt
        turns = [Turn("user", asked)] if isinstance(asked, str) else [*asked]
        system = "\n".join(turn.content for turn in turns if turn.role == "system").strip()
        spoken = [turn for turn in turns if turn.role != "system"]
        if (known := self._known.get(bool(system))) is None:
            return {}
        before, after = known
        begins = prompt.startswith(before.replace("{system}", system)) and spoken[0].content.strip() in prompt
        if not begins or not prompt.endswith(after):
            return {}
        text = spoken[0].content if len(spoken) == 1 else text_of(spoken)
        return {"text": text, "template": f"{before}{{prompt}}{after}"} | ({"system": system} if system else {})

    def _text(self, query: Query, prediction: str | Sequence[float]) -> str:
        """A prediction as text: of log-likelihoods the option that has the highest, and of equal ones the first."""
        if isinstance(prediction, str):
            return prediction
        best = max(range(len(prediction)), key=lambda option: prediction[option])
        return str(self._tokenizer.decode(query.options[best], skip_special_tokens=True)).strip()
