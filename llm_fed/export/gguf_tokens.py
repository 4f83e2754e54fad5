"""What a GGUF file says of a base's tokenizer, so that llama.cpp divides texts as it does.

llama.cpp cannot be told how to split a text; it knows a list of ways by name. Here a tokenizer gets the name of the way
that is its own, by the expressions in it, and is refused if there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llm_fed.basics.errors import UserError
from llm_fed.export.gguf_model import ELSEWHERE, library
from llm_fed.models.prompt import Prompt
from llm_fed.tasks.templates import around

if TYPE_CHECKING:
    from gguf import GGUFWriter

_GPT2 = "(byte level)"  # the expression of GPT-2, which is in the library tokenizers and not in the file
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WAYS = {  # llama.cpp's name by the expressions that split a text, one after another
    (_GPT2,): "gpt-2",
    ("(digits)", _GPT2): "smollm",
    (_LLAMA3,): "llama-bpe",
    (_LLAMA3.replace("{1,3}", ""),): "qwen2",
}
_SPACE = "▁"


def check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that llama.cpp does not know. UserError: what of it is unknown."""
    _way(_read(tokenizer), tokenizer.name_or_path)


def write(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, rows: int, prompt: Prompt) -> None:
    """The tokens, one for each of the `rows` of the base's embedding, how texts become tokens, how a conversation is
    put, and the tokens that end an answer. UserError: llama.cpp does not know how this tokenizer splits texts, or more
    tokens end an answer than a file can say."""
    known = _read(tokenizer)
    model, way = _way(known, tokenizer.name_or_path)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(way)
    texts, kinds = _tokens(known, tokenizer, rows)
    writer.add_token_list(texts)
    pairs = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in known["model"]["merges"]]
    if model == "llama":
        made = {"".join(pair): index for index, pair in reversed([*enumerate(pairs)])}
        writer.add_token_scores([-float(made.get(text, len(pairs))) for text in texts])
        writer.add_add_space_prefix(True)
    else:
        writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_token_types(kinds)
    begins, _ = around(tokenizer)
    writer.add_add_bos_token(bool(begins))
    writer.add_add_eos_token(False)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    ends = sorted(prompt.stop, key=lambda id: id != tokenizer.eos_token_id)
    names = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    if len(ends) > len(names):
        raise UserError(f"{len(ends)} tokens end an answer ({ends}), and a GGUF file names {len(names)}; {ELSEWHERE}")
    for name, id in zip(names, ends, strict=False):
        name(id)
    if prompt.template.date is not None:
        writer.add_chat_template(chat_template(prompt))


def chat_template(prompt: Prompt) -> str:
    """The chat template of a prompt, with the day that answers were trained with."""
    text, date = prompt.template.text, prompt.template.date
    return f"{{%- set date_string = {json.dumps(date)} -%}}{text}" if "date_string" in text else text


def _read(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"the tokenizer of {tokenizer.name_or_path!r} has no tokenizer.json; {ELSEWHERE}")
    return json.loads(tokenizer.backend_tokenizer.to_str())


def _way(known: Mapping[str, Any], name: str) -> tuple[str, str]:
    """llama.cpp's names of a tokenizer's model and of how it splits texts."""
    normalizer, splitter, model = known["normalizer"], known["pre_tokenizer"], known["model"]
    kind = (model["type"], bool(model.get("byte_fallback")))
    if kind == ("BPE", True) and _spaces_are_letters(normalizer, splitter):
        return "llama", "default"
    steps = tuple(filter(None, map(_expression, _sequence(splitter, "pretokenizers"))))
    composes = [step["type"] for step in _sequence(normalizer, "normalizers")] in ([], ["NFC"])
    if kind == ("BPE", False) and composes and steps in _WAYS:
        return "gpt2", _WAYS[steps]
    raise UserError(
        f"the tokenizer of {name!r} is none of those whose way of splitting texts is known here by llama.cpp's name "
        f"({', '.join(_WAYS.values())}, and SentencePiece's of LLaMA 2); {ELSEWHERE}"
    )


def _sequence(step: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    """The steps of a part of a tokenizer, which may be none, one or several."""
    if step is None:
        return ()
    return tuple(step[key]) if step["type"] == "Sequence" else (step,)


def _expression(step: Mapping[str, Any]) -> str:
    """What splits a text in a step; empty if it only spells bytes."""
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return _GPT2 if step["use_regex"] else ""
    if step["type"] == "Digits" and step["individual_digits"]:
        return "(digits)"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex", step))
    return str(step)


def _spaces_are_letters(normalizer: Mapping[str, Any] | None, splitter: Mapping[str, Any] | None) -> bool:
    """Whether texts are split nowhere, with marks for spaces, before the text and behind control tokens."""
    replaced = [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    marked = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": False}
    if splitter is None:
        return list(_sequence(normalizer, "normalizers")) == replaced
    return normalizer is None and splitter == marked


def _tokens(known: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[list[str], list[int]]:
    """The text and the kind of each row's token; rows without one are unused."""
    kinds = library().TokenType
    texts, types = [f"[PAD{row}]" for row in range(rows)], [kinds.UNUSED] * rows
    unknown = known["model"].get("unk_token")
    for text, id in known["model"]["vocab"].items():
        if id < rows:
            spells_byte = known["model"].get("byte_fallback") and len(text) == 6 and text.startswith("<0x")
            kind = kinds.BYTE if spells_byte else kinds.UNKNOWN if text == unknown else kinds.NORMAL
            texts[id], types[id] = text, kind
    for id, token in tokenizer.added_tokens_decoder.items():
        if id < rows and types[id] != kinds.UNKNOWN:
            texts[id], types[id] = token.content, kinds.CONTROL if token.special else kinds.USER_DEFINED
    return texts, [int(kind) for kind in types]
