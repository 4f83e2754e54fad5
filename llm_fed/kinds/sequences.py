"""Sequence classification and regression: an encoder, or a decoder, with a head that reads a text or a pair of texts.

What is trained are adapters, and whole all linear layers between the encoder and the logits, as PEFT's
`modules_to_save` has it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from llm_fed.basics import turns
from llm_fed.basics.errors import UserError, did_you_mean, listed, lookup
from llm_fed.kinds import wording
from llm_fed.kinds.kind import Encoding, Kind, Note
from llm_fed.kinds.sentences import Numbers, Sentence, SentenceEncoding, Sentences, label_of
from llm_fed.models import loading
from llm_fed.models.architectures import FELT, heads_of, longest, usual_targets
from llm_fed.models.base import freeze
from llm_fed.models.deberta import with_own_positions
from llm_fed.models.families import is_causal
from llm_fed.models.labels import FILE as LABELS
from llm_fed.models.labels import as_json
from llm_fed.models.origin import Origin
from llm_fed.models.prompt import Prompt
from llm_fed.models.structure import Structure
from llm_fed.settings.config import NUMBER, AdapterConfig, BaseConfig, Config
from llm_fed.tasks.common import Example, TaskData
from llm_fed.tasks.control import Marks, SafeTokenizer, without_surrogates
from llm_fed.tasks.labelled import place_of

_NUMBERED = re.compile(r"LABEL_\d+|\d+")  # what transformers calls labels that nobody has named
_USUAL = AdapterConfig().target_modules


@dataclass(kw_only=True)
class Sequences(Kind):
    """An encoder or decoder with a classification head, and its tokenizer."""

    noun: ClassVar[str] = "sequence classifier"
    reads: ClassVar[tuple[str, ...]] = ("labels", "values")
    uses: ClassVar[tuple[str, ...]] = ("max_length", "too_long", "bad_rows")

    fresh: tuple[str, ...] = ()  # the layers for which there is no checkpoint, so that every federation draws them
    remark: str = ""  # what the user should know of the head; empty: nothing

    @classmethod
    def load(cls, config: Config, task: TaskData | None, device: str) -> Sequences:
        assert task is not None  # see `before_data`
        return load_sequences(config, task, device)

    @classmethod
    def readable(cls, task: TaskData) -> tuple[str, ...]:
        return ("values",) if task.labels == (NUMBER,) else ("labels",)

    @property
    def identity(self) -> tuple[object, ...]:
        return self.labels, self.fresh

    @property
    def predicts_numbers(self) -> bool:
        return self.labels == (NUMBER,)

    @cached_property
    def has_types(self) -> bool:
        """Whether the model is told which token belongs to the second text of a pair."""
        named = "token_type_ids" in self.tokenizer.model_input_names
        return named and "token_type_ids" in inspect.signature(self.model.forward).parameters

    @cached_property
    def safe(self) -> SafeTokenizer:
        """What reads texts that spell control tokens."""
        return SafeTokenizer(self.tokenizer, "")

    @cached_property
    def is_causal(self) -> bool:
        """Whether padding behind a text reaches none of its tokens."""
        return is_causal(self.model.config)

    @cached_property
    def longest(self) -> int | None:
        """How many tokens it reads."""
        return longest(self.model, self.tokenizer)

    def structure(self, adapter: AdapterConfig | None, architecture: str = "", rank: int | None = None) -> Structure:
        return super().structure(self._meant(adapter), architecture, rank)

    def check_names(self, adapter: AdapterConfig | None) -> None:
        super().check_names(self._meant(adapter))

    def _meant(self, adapter: AdapterConfig | None) -> AdapterConfig | None:
        """The adapter with the layers that this architecture has instead of the default ones."""
        if adapter is None or adapter.target_modules != _USUAL:
            return adapter
        return replace(adapter, target_modules=usual_targets(self.model) or _USUAL)

    def _given(self, module: str, structure: Structure) -> bool:
        return module not in self.fresh

    def examples(self, structure: Structure) -> Sentences:
        return Numbers(base=self) if self.predicts_numbers else Sentences(base=self)

    # Data

    def encoding(self, config: Config, task: TaskData, reads: str, note: Note) -> Encoding:
        return SentenceEncoding(self, config, task.server_labels)

    def encode(self, examples: Sequence[Example]) -> list[Sentence]:
        return self.sentences(examples, self.labels, "an example")

    def sentences(self, examples: Sequence[Example], names: Sequence[str], where: str) -> list[Sentence]:
        """Whole examples as tokens. UserError: a label is none of the `names`, or a token has no embedding; `where`."""
        given = list(examples)
        labels = [label_of(example, names, self.predicts_numbers, where) for example in given]
        pairs = any(example.pair for example in given)
        return self._tokens(
            [str(example.prompt) for example in given], [example.pair for example in given] if pairs else None, labels
        )

    def _tokens(self, first: list[str], second: list[str] | None, labels: Sequence[float]) -> list[Sentence]:
        if not first:
            return []
        texts = [list(map(without_surrogates, each)) for each in ([first] if second is None else [first, second])]
        made = self.tokenizer(*texts, return_token_type_ids=self.has_types)
        ids, types = list(made.input_ids), list(made.token_type_ids) if self.has_types else [[] for _ in labels]
        for index, row in enumerate(zip(*texts, strict=True)):
            if any(map(self.safe.spells, row)):
                ids[index], types[index] = self._as_text(row)
        for each in ids:
            loading.check_rows(each, self.rows, self.tokenizer)
        return [Sentence(*each) for each in zip(ids, types, labels, strict=True)]

    def _as_text(self, row: Sequence[str]) -> tuple[list[int], list[int]]:
        """Tokens and types of one text, or two, in which what spells a control token stays text."""
        marks = Marks(self.safe.spelled, row)
        texts = [self.safe.encode([marks.hide(text, self.safe.pattern)], marks)[0] for text in row]
        around = self.tokenizer(*("a" for _ in row), return_token_type_ids=True)  # what stands before and behind them
        ids: list[int] = []
        types: list[int] = []
        before: int | None = None
        for id, kind, number in zip(around.input_ids, around.token_type_ids, around.sequence_ids(), strict=True):
            own = [id] if number is None else texts[number] if number != before else []
            before = number
            ids += own
            types += [kind] * len(own)
        return ids, types if self.has_types else []

    def cut(self, sentence: Sentence, most: int, *, start: bool = False) -> Sentence:
        """A sentence without the tokens of its texts that are too many, at their end or at their `start`; what the
        tokenizer puts around texts stays."""
        ids, types = sentence.input_ids, sentence.types
        special = self.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
        free = [index for index, is_special in enumerate(special) if not is_special]
        extra = len(ids) - most
        gone = set(free[:extra] if start else free[-extra:])
        kept = [index for index in range(len(ids)) if index not in gone]
        return replace(
            sentence, input_ids=[ids[index] for index in kept], types=[types[index] for index in kept] if types else []
        )

    # Use and export

    def classified(self, given: Any) -> list[Sentence]:
        """Of texts, or of pairs (first, second); the end of what is longer than the base reads is cut."""
        texts = [given] if isinstance(given, str) else list(given)
        pairs = any(not isinstance(text, str) for text in texts)
        if pairs and not all(isinstance(text, list | tuple) and len(text) == 2 for text in texts):
            raise UserError("give texts, or pairs (first, second), to classify")
        first = [text[0] for text in texts] if pairs else texts
        label = 0.0 if self.predicts_numbers else -1
        made = self._tokens(first, [text[1] for text in texts] if pairs else None, [label] * len(texts))
        most = self.longest
        return [each if most is None or len(each.input_ids) <= most else self.cut(each, most) for each in made]

    def read_off(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, 0] if self.predicts_numbers else logits.argmax(-1)

    def wording(self, structure: Structure) -> wording.Wording:
        return wording.SEQUENCES if structure.plain else wording.SEQUENCE_EXPERTS

    def beside_adapters(self, prompt: Prompt | None) -> Mapping[str, bytes]:
        return {LABELS: as_json(self.labels)}


def read_config(base: BaseConfig) -> PretrainedConfig:
    """The configuration of a base, before any of its weights are read. UserError: there is none, or such a model cannot
    have a classification head."""
    found = loading.config_of(base.name, loading.check_name(base.name), base.revision, family=False)
    check_classifier(found, base.name)
    return found


def check_classifier(config: PretrainedConfig, name: str) -> None:
    """Refuse a base that cannot have a classification head. UserError: why not, and what could be given instead."""
    why = "on which transformers puts no classification head"
    if config.is_encoder_decoder:
        why = "an encoder-decoder, whose two halves read the text"
    elif type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        why = FELT.get(config.model_type, "")
    if why:
        raise UserError(
            f"base.name={name!r} is of the family {config.model_type}, {why}; give an encoder such as "
            "FacebookAI/roberta-base, or a causal language model"
        )


def has_head(config: PretrainedConfig) -> bool:
    """Whether a checkpoint was saved with a classification head."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ())


def named_labels(config: PretrainedConfig) -> tuple[str, ...] | None:
    """The names of a head's logits; None where it has none, or numbers."""
    names = tuple(str(name) for _, name in sorted((config.id2label or {}).items()))
    if not has_head(config) or not names or all(_NUMBERED.fullmatch(name) for name in names):
        return None
    return names


@dataclass(frozen=True)
class Head:
    """Which labels the logits have, whether the checkpoint's head is kept, and what the user should know of it."""

    labels: tuple[str, ...]
    kept: bool
    remark: str = ""


def head_for(config: PretrainedConfig, task: TaskData, base: str, requested: tuple[str, ...] | None) -> Head:
    """The head for the labels of a task: the checkpoint's, where its labels are those of the data, else a new one.
    `asked`: `task.labels`, which count more than the names that a head has. UserError: a head with names of its own
    lacks a label, or no label is known."""
    labels, size = task.labels, len(config.id2label or {})
    own = named_labels(config)
    if not labels:
        if own is None:
            raise UserError(f"no label is known: neither the data nor the head of {base} names any; set task.labels")
        return Head(own, kept=True)
    if not has_head(config):
        return Head(labels, kept=False)
    if labels == (NUMBER,):
        return Head(labels, kept=size == 1)
    if own is not None:
        lacking = next((label for label in labels if place_of(label, own) is None), None)
        if lacking is None:
            return Head(own, kept=True)
        if requested is None:
            seen = task.reading.labels if task.reading else {}
            where = f"{seen[lacking]}: " if lacking in seen else ""
            raise UserError(
                f"{where}the head of {base} has no label {lacking!r}{did_you_mean(lacking, own)}; its labels are "
                f"{listed(own, 12)}. Correct the label, or name all labels in task.labels=[{','.join(labels)}] to "
                "train a new head"
            )
        return Head(labels, kept=False, remark=f"the head of {base} has other labels, so a new one is trained")
    indices = [place_of(label, tuple(f"LABEL_{n}" for n in range(size))) for label in labels]
    if all(index is not None for index in indices):
        return Head(tuple(map(str, range(size))), kept=True)
    if requested is not None and len(labels) == size:
        return Head(labels, kept=True)
    why = "numbers its labels, and which is which is not known" if len(labels) == size else f"has {size} labels"
    return Head(labels, kept=False, remark=f"the head of {base} {why}, so a new one is trained")


@contextmanager
def _without_report() -> Iterator[None]:
    """Within, transformers does not report what a checkpoint lacks: a new head is no news, and the rest is checked."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@turns.taken()
def load_sequences(config: Config, task: TaskData, device: str) -> Sequences:
    """The base of a configuration with a head for the labels of a task. Only safetensors is read; no repository's code
    is run. UserError: there is no such base, it has no tokenizer or no complete weights, no head can be put on it, or a
    setting is not for it."""
    base, _ = loading.settle_dtype(config.base, device)
    dtype = lookup("base.dtype", base.dtype, loading.DTYPES)
    if base.quantization or base.device_map:
        raise UserError("base.quantization and base.device_map are for language models that write; leave them out")
    found = read_config(base)
    head = head_for(found, task, base.name, config.task.labels)
    folder = loading.check_name(base.name)
    by_name = {label: index for index, label in enumerate(head.labels)}
    try:
        tokenizer = loading.read_words(folder, base.revision)
        with torch.random.fork_rng(devices=[]), _without_report():
            torch.manual_seed(0)  # of a new head, which every federation draws anew
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, revision=base.revision, num_labels=len(head.labels), id2label=dict(enumerate(head.labels)),
                label2id=by_name, ignore_mismatched_sizes=True, dtype=dtype, use_safetensors=True,
                trust_remote_code=False, output_loading_info=True,
                attn_implementation=loading.attention(AutoModelForSequenceClassification, found, dtype, device),
            )  # fmt: skip
    except Exception as error:  # transformers, tokenizers and safetensors share no class of errors
        raise UserError(loading.explain(base.name, error, "a sequence classifier")) from error
    model, report = loaded
    missing = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
    heads = heads_of(model, missing, base.name)
    absent = {entry.rpartition(".")[0] for entry in missing}
    fresh = tuple(layer for layer in heads if layer in absent or (layer == heads[-1] and not head.kept))
    poolers = [layer for layer in fresh if "pooler" in layer and layer.startswith(model.base_model_prefix)]
    lacking = f"{base.name} has no weights for {', '.join(poolers)}, which is trained like the head" if poolers else ""
    remark = "; ".join(filter(None, (head.remark, lacking)))
    _with_padding(model, tokenizer, base.name)
    with_own_positions(model)
    freeze(model.to(device))
    if base.activation_checkpointing:
        loading.checkpoint_activations(model, base.name)
    return Sequences(
        model=model, tokenizer=tokenizer, name=base.name, dtype=dtype,
        autocast=None if dtype == torch.float32 else dtype, head=heads[-1], before_head=heads[:-1], labels=head.labels,
        origin=Origin.of(base), fresh=fresh, remark=remark,
    )  # fmt: skip


def _with_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Let tokenizer and model agree on the token of padding, by which the head of a decoder finds the end of a text."""
    loading.ensure_pad_token(tokenizer, name)
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = tokenizer.pad_token_id
        if hasattr(config, "use_cache"):
            config.use_cache = False
