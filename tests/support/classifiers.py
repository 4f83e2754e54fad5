"""Tiny encoders and decoders for sequence classification, their tokenizer, and labelled texts, all made here."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from llm_fed.basics.rng import generator
from llm_fed.runs.records import read_records

WORDS = 30  # w0 to w9 speak of sport, w10 to w19 of trade, the others of the weather
LABELS = ("sport", "trade", "weather")
_SHAPE: dict[str, Any] = {
    "vocab_size": WORDS + 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "initializer_range": 0.2,  # far from linear, so that every part of the model matters
}  # fmt: skip
_DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
_GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}
_DEBERTA = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_buckets": 8,
    "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
}  # fmt: skip
# By name: the class of a checkpoint as it is published, what its configuration says beside _SHAPE, and the layers that
# have adapters.
BASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bert": ("BertModel", {}, ("query", "value")),
    "bert-without-pooler": ("BertForMaskedLM", {}, ("query", "value")),
    "roberta": ("RobertaForMaskedLM", {"max_position_embeddings": 42}, ("query", "value")),
    "deberta-v2": ("DebertaV2Model", {**_DEBERTA, "share_att_key": False, "conv_kernel_size": 3, "conv_act": "gelu"},
                   ("query_proj", "value_proj")),
    "deberta-v3": ("DebertaV2Model", _DEBERTA, ("query_proj", "value_proj")),
    "distilbert": ("DistilBertForMaskedLM", _DISTIL, ("q_lin", "v_lin")),
    "modernbert": ("ModernBertForMaskedLM", {"global_attn_every_n_layers": 2, "local_attention": 4,
                                             "cls_token_id": 0, "sep_token_id": 2}, ("Wqkv",)),
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}, ("q_proj", "v_proj")),
    "gpt2": ("GPT2LMHeadModel", _GPT2, ("c_attn",)),
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, `<s>` before a text and `</s>` behind it; the second text of a pair has the type 1."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{n}" for n in range(WORDS))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **special
    )


def written(folder: Path, name: str, change: Callable[[Any], None] = lambda model: None, **settings: Any) -> Path:
    """A base of BASES with random weights, in `folder`, with its tokenizer.

    Args:
        change: is given the model before it is written.
        settings: of its configuration; `kind` is another class than that of BASES.
    """
    kind, more, _ = BASES[name]
    kind = settings.pop("kind", kind)
    config: Any = getattr(transformers, kind).config_class
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config(**{**_SHAPE, **more, **settings}))
    change(model)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def rows(client: int, size: int, *, pairs: bool = False, numbers: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """Texts whose words say their label, or a number, most of which is the label; each client has few of one label."""
    draws, found = generator(seed, "texts", client, size), []
    for n in range(size):
        label = n % 3 if n % 9 else (client + 1) % 3
        length = 2 + int(torch.randint(5, (), generator=draws))
        words = torch.randint(10 * label, 10 * label + 10, (length,), generator=draws).tolist()
        text = " ".join(f"w{word}" for word in words)
        row: dict[str, Any] = {"text": text, "label": LABELS[label]}
        if pairs:
            row = {"sentence1": text, "sentence2": f"w{(7 * n) % WORDS} w{n % WORDS}", "label": LABELS[label]}
        if numbers:
            row = {"text": text, "score": round(label / 2 + 0.01 * length, 2)}
        found.append(row)
    return found


def federation(folder: Path, sizes: Sequence[tuple[str, int]] = (("train", 18), ("test", 9)), **what: Any) -> Path:
    """Three clients with a file for each split; `what` as of `rows`."""
    for number, client in enumerate(("ada", "bob", "cyd")):
        (folder / client).mkdir(parents=True)
        for place, (split, size) in enumerate(sizes):
            lines = [json.dumps(row) for row in rows(number, size, seed=place, **what)]
            (folder / client / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


def check_learned(folder: Path) -> None:
    """The loss of a run has fallen, and its accuracy is above chance."""
    losses = [line["loss"] for line in read_records(folder / "metrics.jsonl") if line["kind"] == "round"]
    assert losses[-1] < 0.8 * losses[0]
    scores = summary(folder)["scores"]
    assert scores["metric"] == "accuracy" and scores["mean"] > 50


def tree(base: Path, data: Path, method: str = "fedit", **changes: Any) -> dict[str, Any]:
    """A configuration of a short run; `changes` are whole sections."""
    return {
        "seed": 0,
        "rounds": 4,
        "base": {"name": str(base), "dtype": "float32"},
        "adapter": {"rank": 2, "alpha": 4, "dropout": 0.1},
        "task": {"name": "classification", "path": str(data), "validation": 0.2},
        "method": {"name": method},
        "local": {"steps": 6, "batch_size": 6, "lr": 0.02, "lr_end": 0.02},
        "eval": {"every": 1, "cross": False, "base": False},
        "device": "cpu",
        **changes,
    }
