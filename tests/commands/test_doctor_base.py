"""`llm-fed doctor --base`: what it says of bases as they are, and of names that are none."""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

from llm_fed.commands.doctor import known_of
from llm_fed.testing.tiny import HEADS, tokenizer


def folder(path: Path, model: Any, **special: str) -> Path:
    model.save_pretrained(path)
    tokenizer(**special).save_pretrained(path)
    return path


def said(path: Path) -> dict[str, str]:
    return {finding["what"].partition(" (")[0]: finding["found"] for finding in known_of(str(path))}


def test_a_llama_in_numbers(tmp_path):
    """Its layers: q_proj 24 x 24 and v_proj 24 x 12, so 8 (24 + 24 + 24 + 12) parameters each in two layers."""
    model = tiny.build("llama")
    found = said(folder(tmp_path / "base", model, eos_token="</s>"))
    count = sum(p.numel() for p in model.parameters())
    assert found["family"] == "llama (LlamaForCausalLM), tested against stock PEFT on a small model"
    assert found["size"].startswith(f"{count:,} parameters; weights of {4 * count / 1000:.1f} kB in float32")
    assert found["context"] == "64 tokens"
    assert found["adapters on q_proj and v_proj"] == "4 layers (q_proj, v_proj), 1,344 parameters at rank 8"
    assert found["adapters on all-linear"].startswith("14 layers (down_proj, gate_proj")
    assert "task.template=chat is not possible" in found["chat template"] and "'</s>'" in found["end-of-answer tokens"]


def test_what_a_mixture_and_another_family_lack(tmp_path):
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4}
    mixture = MixtralForCausalLM(MixtralConfig(**{**HEADS, **changes}))
    found = said(folder(tmp_path / "mixture", mixture, eos_token="</s>"))
    assert (
        "no: " in found["adapters on all-linear"] and "[q_proj,k_proj,v_proj,o_proj]" in found["adapters on all-linear"]
    )
    assert found["context"].endswith("sees 4 of them")
    other = said(folder(tmp_path / "gpt2", tiny.build("gpt2"), eos_token="</s>"))
    assert "not tested against stock PEFT yet" in other["family"]
    assert "no: " in other["adapters on q_proj and v_proj"] and "c_attn" in other["adapters on q_proj and v_proj"]


def test_tokens_without_an_embedding(tmp_path):
    place = folder(tmp_path / "base", tiny.build("llama"), eos_token="</s>")
    assert said(place)["tokens"] == "61, each with an embedding"
    more = AutoTokenizer.from_pretrained(place)
    more.add_tokens(["<crate>", "<bay>"])
    more.save_pretrained(place)
    told = said(place)["tokens"]
    assert told.startswith(
        "63, of which 2 have no embedding: '<crate>' (61), '<bay>' (62). Texts with such a token are"
    )
    assert "resize_token_embeddings" in told


def test_chat_templates(tmp_path):
    place = folder(tmp_path / "base", tiny.build("llama"), eos_token="</s>")
    (place / "chat_template.jinja").write_text("x")
    assert said(place)["chat template"].startswith("yes")


def test_a_tokenizer_without_an_end_cannot_be_used(tmp_path, llm_fed):
    place = folder(tmp_path / "base", tiny.build("llama"))
    answer = llm_fed("doctor", "--base", place, "--json")
    (bad,) = [finding for finding in json.loads(answer.out) if not finding["ok"]]
    assert answer.code == 1 and "neither a pad nor an EOS token" in bad["found"]


def test_no_weight_is_read(tmp_path, llm_fed):
    place = folder(tmp_path / "base", tiny.build("llama"), eos_token="</s>")
    (place / "model.safetensors").write_bytes(b"")
    answer = llm_fed("doctor", "--base", place)
    assert answer.code == 0 and answer.out.splitlines()[0].startswith("ok   family: llama")
    assert torch.get_default_device().type != "meta"


def test_no_base(tmp_path, llm_fed):
    llm_fed("doctor", "--base", tmp_path / "none").assert_refused("is not a folder", "Qwen/Qwen3-0.6B")
