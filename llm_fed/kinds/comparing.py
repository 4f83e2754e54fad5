"""The encoding of preferences: examples with what they are compared with, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llm_fed.basics.errors import UserError, one_line
from llm_fed.tasks.common import AnswerPair, Encoded, Example, Judged, text_of

Encode = Callable[[Example], Encoded | None]  # an example with its first answer, as training sees it


def check(name: str, examples: Sequence[Example]) -> None:
    """UserError unless all examples of a split are of the form that the loss `name` learns from."""
    judged = name == "kto"
    for place, example in enumerate(examples):
        if (example.desirable is None) if judged else not example.rejected:
            lacks, columns = ("label that says true or false", "prompt, completion and label") if judged else (
                "rejected answer", "prompt, chosen and rejected"
            )  # fmt: skip
            answers = f"that ends with {one_line(text_of(example.prompt))[-60:]!r}"
            raise UserError(
                f"{_where(examples, place)}objective.name={name} learns from rows with {columns}, but the prompt "
                f"{answers} has no {lacks}; add it, name its column in task.columns, or set objective.name="
                f"{'dpo' if judged and example.rejected else 'kto' if example.desirable is not None else 'sft'}"
            )


def only_label(examples: Sequence[Example]) -> bool | None:
    """Whether all answers are desirable (True) or all are not (False); None where there are both, or no examples."""
    first: bool | None = None
    for example in examples:
        if first is None:
            first = bool(example.desirable)
        elif bool(example.desirable) != first:
            return None
    return first


def _where(examples: Sequence[Example], place: int) -> str:
    """The file and row of an example, where that is known."""
    where = getattr(examples, "where", None)
    return f"{where(place)}: " if where else ""


def rejected(example: Example) -> Example:
    """An example as it would be with the rejected answer."""
    *before, last = example.rejected
    prompt = example.prompt if isinstance(example.prompt, str) else tuple(before)
    return replace(example, prompt=prompt, answers=(last.content,), fields=last.fields)


def example_of(name: str, example: Example, encode: Encode) -> Encoded | AnswerPair | Judged | None:
    """What the loss `name` is given of an example; None where it is too long, or no target is left."""
    one = encode(example)
    if name == "sft" or one is None:
        return one
    if name == "kto":
        return Judged(one, bool(example.desirable), one)
    other = encode(rejected(example))
    return AnswerPair(one, other) if other and any(other.target) and any(one.target) else None


def beside_others(items: Sequence[Judged], max_length: int) -> list[Judged]:
    """The answers with each prompt beside another one's answer, that of the example before it."""
    found = []
    for place, item in enumerate(items):
        asked, answer = item.text.asked, items[place - 1].text.answer
        ids = [*asked, *answer][:max_length]
        target = [False] * len(asked) + [True] * len(answer)
        found.append(replace(item, other=Encoded(ids, target[: len(ids)])))
    return found
