"""Small tokenizers of every kind, built here: with line breaks that merge, spaces before texts, bytes for what is
unknown, and control tokens that are words of the vocabulary, too."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import PreTrainedTokenizerFast

WORDS = (
    "Bay", " 4", ".", "the", " crate", "don't", "\n", "\n\n", " ", "  ", "\t", "é", "e\u0301", "🙂", "👩‍👩‍👧", "東京",
    "שלום", "हिन्दी", "12345", "3.14", "a != b ?", "|", "[INST]", "### User:", "user\n", "<", "s>", "</", "<b>",
    "\u00a0", "\u2028", "model",
)  # fmt: skip
CORPUS = [
    "".join(random.Random(seed).choices(WORDS, k=30)) + "Which bay? user\nassistant\nThis one." for seed in range(60)
]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Style:
    """The control tokens that a tokenizer has for templates."""

    start: str
    end: str
    bos: str


@cache
def tokenizers() -> dict[str, tuple[PreTrainedTokenizerFast, Style]]:
    """Of each kind one that is built here."""
    chatml = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    return {
        "bytes": (_bytes(chatml, "<|endoftext|>"), Style("<|im_start|>", "<|im_end|>", "")),
        "bytes with BOS": (_bytes(["<s>", "</s>", "<|user|>"], "</s>", "<s>"), Style("<|user|>", "</s>", "<s>")),
        "llama": (_sentences(), Style("<s>", "</s>", "<s>")),
        "gemma": (_spaces(), Style("<start>", "<end_of_turn>", "<bos>")),
        "unigram": (_unigram(), Style("<s>", "</s>", "")),
        "words": (_words(), Style("<|im_start|>", "</s>", "")),
    }  # fmt: skip


def _whole(inner: Tokenizer, eos: str, bos: str | None, **more: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token=bos, pad_token=eos, **more)


def _begins(inner: Tokenizer, bos: str) -> None:
    number = inner.token_to_id(bos)
    inner.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])


def _bytes(special: Sequence[str], eos: str, bos: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges line breaks, and has tags of reasoning that are not special, as Qwen3."""
    inner = Tokenizer(BPE())
    inner.normalizer = normalizers.NFC() if bos is None else None
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS, BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    inner.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>", "<tool_call>")]
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if bos:
        _begins(inner, bos)
    return _whole(inner, eos, bos)


def _sentences() -> PreTrainedTokenizerFast:
    """BPE over whole texts with a space before each, and bytes of what it does not know, as LLaMA-2."""
    inner = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(marks)
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.train_from_iterator(
        [line.replace("\n", "") for line in CORPUS],
        BpeTrainer(vocab_size=520, special_tokens=known, show_progress=False),
    )
    inner = Tokenizer.from_str(_without_bytes(inner.to_str()))
    strip = decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    _begins(inner, "<s>")
    return _whole(inner, "</s>", "<s>", unk_token="<unk>")


def _without_bytes(text: str) -> str:
    """A tokenizer whose bytes are no added tokens; its trainer takes what it must know as such."""
    known = json.loads(text)
    known["added_tokens"] = [token for token in known["added_tokens"] if not token["content"].startswith(("<0x", "\n"))]
    return json.dumps(known)


def _spaces() -> PreTrainedTokenizerFast:
    """BPE over whole texts without a space before them, with line breaks and tags that are added tokens, as Gemma."""
    inner = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    known = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n"]
    inner.train_from_iterator(CORPUS, BpeTrainer(vocab_size=560, special_tokens=known, show_progress=False))
    inner = Tokenizer.from_str(_without_bytes(inner.to_str()))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("\n\n", "\n\n\n", "<b>", "<table>")]
    )
    inner.add_special_tokens([AddedToken(text, normalized=False) for text in ("<start>", "<end_of_turn>")])
    _begins(inner, "<bos>")
    return _whole(inner, "<eos>", "<bos>", unk_token="<unk>")


def _unigram() -> PreTrainedTokenizerFast:
    """Unigram with its control tokens in the vocabulary, as T5."""
    inner = Tokenizer(Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=250, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator([line.replace("\n", " ") for line in CORPUS], trainer)
    return _whole(inner, "</s>", None, unk_token="<unk>")


def _words() -> PreTrainedTokenizerFast:
    """A token per word, whose vocabulary holds its control tokens, too."""
    known = ["<unk>", "</s>", "<|im_start|>", "<think>", *dict.fromkeys(" ".join(CORPUS).split())]
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(text, normalized=False) for text in ("</s>", "<|im_start|>")])
    return _whole(inner, "</s>", None, unk_token="<unk>")
