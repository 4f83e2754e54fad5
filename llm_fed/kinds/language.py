"""Causal language models with adapters, on prompts and answers, conversations, or plain texts."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llm_fed.basics import turns
from llm_fed.basics.errors import UserError, lookup
from llm_fed.engine import generation, inference
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.continuous import Sampling
from llm_fed.engine.engine import Engine
from llm_fed.engine.examples import TEXT, Examples
from llm_fed.engine.generation import most_rows, room_after
from llm_fed.engine.preferences import examples_of
from llm_fed.engine.trainable import Answering, Handler
from llm_fed.kinds import wording
from llm_fed.kinds.encoding import Encoder
from llm_fed.kinds.kind import Encoding, Kind, Note
from llm_fed.method.requests import AnswerLoss, Generate, LogLikelihoods, OptionScores
from llm_fed.models import loading, prompt
from llm_fed.models.base import freeze
from llm_fed.models.families import check_family
from llm_fed.models.lora import Lora
from llm_fed.models.origin import Origin
from llm_fed.models.prompt import Prompt
from llm_fed.models.structure import Structure
from llm_fed.settings import objects
from llm_fed.settings.config import LIKELIHOOD, BaseConfig, Config
from llm_fed.state import State
from llm_fed.tasks.common import AnswerPair, Encoded, Judged, TaskData, Template
from llm_fed.tasks.templates import Prompt as PromptText
from llm_fed.tasks.templates import encode_prompt, template_of

Item = TypeVar("Item")
_tie = PreTrainedModel.tie_weights


@dataclass(kw_only=True)
class Language(Kind):
    """A causal language model and its tokenizer."""

    trains: Examples = TEXT  # the examples that clients train on: texts, or preferences with the loss of `objective`
    noun: ClassVar[str] = "language model"
    reads: ClassVar[tuple[str, ...]] = ("texts", "options", "loss", "preferences")
    knows: ClassVar[bool] = True
    before_data: ClassVar[bool] = True

    @classmethod
    def load(cls, config: Config, task: TaskData | None, device: str) -> Language:
        if objects.is_object(config.base.name):
            model, tokenizer = objects.find("base.name", config.base.name)
            return around(model, tokenizer, config.base)
        return load_base(config.base, device)

    @classmethod
    def notes(cls, config: Config, task: TaskData) -> list[str]:
        template, found = config.task.template, []
        if task.metric == LIKELIHOOD and template != "{prompt}":
            found.append(
                f"texts are learned without task.template={template}, which only chats and exports would use; set "
                "task.template='{prompt}'"
            )
        roles = task.reading.roles if task.reading else {}
        for role, objective in (("rejected", "dpo"), ("label", "kto")):
            if config.objective.name == "sft" and role in roles:
                found.append(
                    f"objective.name=sft does not learn from the column {roles[role]!r}; to learn from it, too, set "
                    f"objective.name={objective}"
                )
        if r"\n" in template:
            found.append(
                r"task.template holds a backslash and an n, which models will read as these two letters; for a line "
                "break, write the text in double quotes in YAML"
            )
        return found

    @classmethod
    def hint(cls, config: BaseConfig, device: str) -> str:
        return loading.bfloat16_hint(config.dtype) if device == "cpu" else ""

    def configured(self, config: Config) -> Language:
        trains = examples_of(config.objective) if config.objective.preferences else TEXT
        return replace(self, prompt=self.prompt_of(config), trains=trains)

    def as_said(
        self, config: Config, prompt_of_folder: Callable[[], Prompt | None], keys: Collection[str]
    ) -> tuple[Language, Config, Prompt | None]:
        folder = said = prompt_of_folder()
        if said is None:
            return self, config, None
        if "task.template" in keys:
            template = template_of(config.task.template, self.tokenizer)
            said = replace(said, template=template, stop=prompt.stops(replace(self, prompt=said), template))
        if "eval.max_new_tokens" in keys:
            said = replace(said, max_new_tokens=config.eval.max_new_tokens)
        task = replace(config.task, template=said.template.name)
        evaluation = replace(config.eval, max_new_tokens=said.max_new_tokens)
        return replace(self, prompt=said), replace(config, task=task, eval=evaluation), folder

    def examples(self, structure: Structure) -> Examples:
        return self.trains

    def features(self, structure: Structure, examples: Sequence[Encoded]) -> Tensor:
        """(N, H): the last hidden state at the last token of each prompt."""
        return inference.features(self, [example.prompt for example in examples])

    def encoding(self, config: Config, task: TaskData, reads: str, note: Note) -> Encoding:
        room = partial(room_after, self, wanted=config.eval.max_new_tokens) if reads == "texts" else None
        return Encoder(self.tokenizer, config, self.prompt and self.prompt.template, self.rows, room)

    def wording(self, structure: Structure) -> wording.Wording:
        return wording.ADAPTER if structure.plain else wording.EXPERTS

    def beside_adapters(self, prompt_of_model: Prompt | None) -> Mapping[str, bytes]:
        return {} if prompt_of_model is None else {prompt.FILE: prompt_of_model.as_json(self.tokenizer, self.source)}

    def prompt_of(self, config: Config) -> Prompt:
        """Raises UserError where the template is `chat` and the tokenizer has none."""
        if self.prompt is not None:
            return replace(self.prompt, max_new_tokens=config.eval.max_new_tokens)
        template = template_of(config.task.template, self.tokenizer)
        return Prompt(template, prompt.stops(self, template), config.eval.max_new_tokens)

    def tokens(self, prompts: Sequence[PromptText], template: str | Template | None) -> list[list[int]]:
        said = self.prompt
        chosen = template or (said.template if said else "alpaca-short")
        tokens = [encode_prompt(each, self.tokenizer, template=chosen) for each in prompts]
        for ids in tokens:
            loading.check_rows(ids, self.rows, self.tokenizer)
        return tokens

    def bank(self, structure: Structure, state: State) -> AdapterBank:
        """Around the model, with one adapter."""
        return self.engine().adapted(structure).bank_of([state])

    def write(
        self, structure: Structure, state: State, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int
    ) -> list[str]:
        """Greedy answers to prompts under one adapter."""
        mix = self.mixing_weights(structure, [(state, prompt) for prompt in prompts])
        return generation.generate(
            self, self.bank(structure, state), [(0, prompt) for prompt in prompts], max_new_tokens=max_new_tokens,
            batch_size=batch_size, mix=mix,
        )  # fmt: skip

    def stream(
        self,
        structure: Structure,
        state: State,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
    ) -> Iterator[int]:
        """The tokens of an answer to a prompt under one adapter; without `sampling` the greedy one."""
        mix = self.mixing_weights(structure, [(state, prompt)])
        bank = self.bank(structure, state)
        return generation.stream(self, bank, prompt, max_new_tokens=max_new_tokens, mix=mix, sampling=sampling)

    def answer_text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """An answer's tokens as text, without reasoning."""
        return generation.answer_text(self, prompt, tokens)

    def mixing_weights(self, structure: Structure, requested: Sequence[tuple[State, Sequence[int]]]) -> Tensor | None:
        """The weights of two experts for each prompt; None unless the prompt decides them."""
        if not (isinstance(structure, Lora) and structure.gate == "mix"):
            return None
        own = inference.features(self, [prompt for _, prompt in requested])
        return inference.similarity_weights(own, [state for state, _ in requested])

    def generate(self, requests: Sequence[Generate], engine: Engine) -> Sequence[list[str]]:
        structure, states = requests[0].structure, [request.state for request in requests]
        prompts = [(row, prompt) for row, request in enumerate(requests) for prompt in request.prompts]
        texts = generation.generate(
            self, engine.adapted(structure).bank_of(states), prompts,
            max_new_tokens=engine.evaluation.max_new_tokens,
            batch_size=most_rows(engine.evaluation.batch_size, self.device),
            mix=self.mixing_weights(structure, [(states[row], prompt) for row, prompt in prompts]),
            captures=engine.captures, fuses=bool(engine.ways.fused), free=engine.free,
        )  # fmt: skip
        return list(_shared_out(texts, [len(request.prompts) for request in requests]))

    def answer_losses(self, requests: Sequence[AnswerLoss], engine: Engine) -> Sequence[float]:
        """Of all clients in the same passes, as little memory as training takes being enough."""
        structure, states = requests[0].structure, [request.state for request in requests]
        examples = [[query.example for query in request.queries] for request in requests]
        prompts = [(request.state, query.prompt) for request in requests for query in request.queries]
        model, mix = engine.adapted(structure), self.mixing_weights(structure, prompts)
        bank = model.bank_of(states)
        requested = list(enumerate(examples))
        return model.within_memory(partial(inference.mean_losses, bank=bank, requested=requested, mix=mix))

    def log_likelihoods(self, requested: LogLikelihoods, engine: Engine) -> list[tuple[float, ...]]:
        """Of one client after another: its examples fill micro-batches by themselves."""
        model = engine.adapted(requested.structure)
        bank = None if requested.state is None else model.bank_of([requested.state])
        found: list[tuple[float, ...]] = []
        size = requested.chunk or max(1, len(requested.examples))
        for at in range(0, len(requested.examples), size):
            examples = requested.examples[at : at + size]
            texts = [text for example in examples for text in example.texts]
            mix = self._mix_of(requested, examples)
            each = model.within_memory(partial(inference.log_likelihoods, bank=bank, texts=texts, mix=mix))
            found += [tuple(own) for own in _shared_out(each, [len(example.texts) for example in examples])]
        return found

    def _mix_of(self, requested: LogLikelihoods, examples: Sequence[AnswerPair | Judged]) -> Tensor | None:
        """(texts of all examples, E): the weights of two experts, where there are such."""
        structure = requested.structure
        if requested.state is None or not (isinstance(structure, Lora) and structure.gate == "mix"):
            return None
        count = [len(example.texts) for example in examples]
        if requested.mix is not None:
            return torch.tensor([requested.mix] * sum(count))
        weights = self.mixing_weights(structure, [(requested.state, example.prompt) for example in examples])
        return None if weights is None else weights.repeat_interleave(torch.tensor(count), dim=0)

    def option_scores(self, requests: Sequence[OptionScores], engine: Engine) -> Sequence[list[list[float]]]:
        structure, states = requests[0].structure, [request.state for request in requests]
        queries = [
            (row, query.prompt, list(query.options))
            for row, request in enumerate(requests)
            for query in request.queries
        ]
        scores = generation.option_log_likelihoods(
            self, engine.adapted(structure).bank_of(states), queries,
            batch_size=most_rows(engine.evaluation.batch_size, self.device),
            mix=self.mixing_weights(structure, [(states[row], prompt) for row, prompt, _ in queries]),
            free=engine.free,
        )  # fmt: skip
        return list(_shared_out(scores, [len(request.queries) for request in requests]))

    answering: ClassVar[Answering] = {
        (Generate, True): Handler(generate),
        (AnswerLoss, True): Handler(answer_losses),
        (LogLikelihoods, True): Handler(log_likelihoods, each=True),
        (OptionScores, True): Handler(option_scores),
    }


def _shared_out(results: Iterable[Item], counts: Sequence[int]) -> Iterator[list[Item]]:
    """The first so many results, then the next so many, and so on."""
    remaining = iter(results)
    return (list(islice(remaining, count)) for count in counts)


@turns.taken()
def load_base(config: BaseConfig, device: str) -> Language:
    """The base of a run on `device` ("cpu", "cuda:1"). Only safetensors is read; no repository's code is run.

    A tokenizer without a pad token pads with its EOS; padding is always masked, so this changes no result. With
    activation checkpointing the model stays in eval mode too: its layers are only marked here, and
    `memory.activation_checkpointing` makes them recompute. UserError: unknown dtype or quantization, a device map
    without a GPU, no such folder or Hub model, or it is no complete causal LM, or of a family whose rows depend on
    their neighbours.
    """
    config, _ = loading.settle_dtype(config, device)
    dtype = lookup("base.dtype", config.dtype, loading.DTYPES)
    if config.quantization is not None:
        lookup("base.quantization", config.quantization, loading.QUANTIZATIONS)
    if config.device_map and device == "cpu":
        raise UserError("base.device_map=auto splits the base over GPUs, but this run is on the CPU; leave it out")
    folder_or_id = loading.check_name(config.name)
    # It warns of missing optional kernels when imported, and with int8 at every layer of every forward pass.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    settings = loading.config_of(config.name, folder_or_id, config.revision)
    try:
        tokenizer = loading.read_words(folder_or_id, config.revision)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder_or_id, revision=config.revision, dtype=dtype, device_map=config.device_map or {"": device},
            quantization_config=loading.quantization(config.quantization, dtype) if config.quantization else None,
            attn_implementation=loading.attention(AutoModelForCausalLM, settings, dtype, device),
            use_safetensors=True, trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # transformers, tokenizers and safetensors share no class of errors
        raise UserError(loading.explain(config.name, error, "a causal LM")) from error
    model, report = loaded
    if missing := set(report["missing_keys"]):
        _tie(model, missing, recompute_mapping=False)  # which a thread that loads a model suspends in all threads
    if missing:
        raise UserError(
            f"base.name={config.name!r} has no weights for {len(missing)} tensors of {type(model).__name__}, "
            f"e.g. {min(missing)}; give a complete causal language model"
        )
    return _frozen(model, tokenizer, config, Origin.of(config))


def around(model: Any, tokenizer: Any, config: BaseConfig) -> Language:
    """The base of a model that is loaded already. It is used as it is, frozen and in evaluation mode, where it lies.
    UserError: it is no causal language model of transformers, of a family that cannot be a base, or a setting asks for
    what only a model that is loaded here can have."""
    if hasattr(model, "merge_and_unload"):
        raise UserError(
            "base= is a PEFT model; give model.merge_and_unload(), or the base, and the adapter as start=FOLDER"
        )
    if not isinstance(model, PreTrainedModel) or not callable(tokenizer):
        raise UserError(
            f"base= is a pair of {type(model).__name__} and {type(tokenizer).__name__}; give a causal language model "
            "of transformers (a PreTrainedModel, yours too) with its tokenizer; for another model derive a kind from "
            "llm_fed.kinds.Kind, and give it as base="
        )
    if config.quantization or config.device_map or config.revision:
        raise UserError(
            "base.quantization, base.device_map and base.revision say how a model is loaded, but base= gives a loaded "
            "one; leave them out"
        )
    check_family(model.config, config.name)
    attention = model.config._attn_implementation
    if attention not in (None, "eager", *ALL_ATTENTION_FUNCTIONS):
        raise UserError(
            f"the model given as base= has the attention {attention!r:.60}, which transformers does not know; call "
            "model.set_attn_implementation('sdpa'), or register yours with transformers.AttentionInterface.register"
        )
    dtype = lookup("base.dtype", config.dtype, loading.DTYPES)
    if model.dtype != dtype:
        raise UserError(f"base.dtype={config.dtype}, but the model given as base= is in {model.dtype}; leave it out")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return _frozen(model, copy.deepcopy(tokenizer), config, None)


def _frozen(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: BaseConfig, origin: Origin | None
) -> Language:
    loading.ensure_pad_token(tokenizer, config.name)
    freeze(model)
    if config.activation_checkpointing:
        loading.checkpoint_activations(model, config.name)
    dtype = loading.DTYPES[config.dtype]
    autocast = None if dtype == torch.float32 else dtype
    return Language(model=model, tokenizer=tokenizer, name=config.name, dtype=dtype, autocast=autocast, origin=origin)
