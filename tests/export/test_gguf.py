"""GGUF files: what stands in them, that llama.cpp answers from them as base and adapter do, and what is refused.

llama.cpp runs in this process, by the library `llama-cpp-py-sync`. All numbers are kept in float32, so that an answer
differs from transformers' only where two tokens are as likely. The library brings its own libllama.so, which needs
glibc 2.38; LLAMA_CPP_LIB names one that was built elsewhere.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from byte_tokenizer import byte_tokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llm_fed import load_client
from llm_fed.basics.errors import UserError
from llm_fed.experiment import run as experiment
from llm_fed.export import gguf_tokens
from llm_fed.export.gguf_model import Architecture
from llm_fed.settings import configfile
from llm_fed.testing.tiny import drawn


def missing() -> str:
    """Why llama.cpp is not here; empty where it is."""
    try:
        _library()
    except (ImportError, RuntimeError, OSError) as error:
        return f"llama-cpp-py-sync does not load: {str(error)[-200:]}"
    return ""


def _library() -> Any:
    import llama_cpp_py_sync
    from llama_cpp_py_sync import _cffi_bindings as bindings

    if own := os.environ.get("LLAMA_CPP_LIB"):
        bindings._find_library = lambda: own  # it would take its own first
    bindings.get_lib()
    return llama_cpp_py_sync


class LlamaCpp:
    """A GGUF model, and what llama.cpp does with it."""

    def __init__(self, model: Path, longest: int = 512):
        self.llama = _library().Llama(
            str(model), n_ctx=longest, n_threads=1, type_k="f32", type_v="f32", flash_attn_type=0
        )
        self._lib, self._ffi = self.llama._lib, self.llama._ffi
        self._adapters: dict[Path, Any] = {}

    def choose(self, adapter: Path | None) -> None:
        """Answer with an adapter from now on, or with none."""
        lib, ffi = self._lib, self._ffi
        if adapter is not None and adapter not in self._adapters:
            self._adapters[adapter] = lib.llama_adapter_lora_init(self.llama._model, str(adapter).encode())
            assert self._adapters[adapter] != ffi.NULL, f"llama.cpp cannot load {adapter}"
        chosen = [] if adapter is None else [self._adapters[adapter]]
        given = ffi.new("struct llama_adapter_lora *[]", chosen or [ffi.NULL])
        assert lib.llama_set_adapters_lora(self.llama._ctx, given, len(chosen), ffi.new("float[]", [1.0])) == 0

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Those of a text, with what begins every text; with `special`, control tokens that it spells are read."""
        return self.llama.tokenize(text, add_special=True, parse_special=special)

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """(V,): of the token after a prompt."""
        self.llama._clear_context_state()
        self.llama._eval_tokens(list(prompt), 0)
        return self._last()

    def answer(self, prompt: Sequence[int], most: int) -> list[int]:
        """The greedy answer's tokens, without the one that ends it."""
        logits, found = self.logits(prompt), []
        while len(found) < most:
            token = int(logits.argmax())
            if self._lib.llama_vocab_is_eog(self.llama._vocab, token):
                break
            found.append(token)
            self.llama._eval_tokens([token], len(prompt) + len(found) - 1)
            logits = self._last()
        return found

    def close(self) -> None:
        self.llama.close()

    def _last(self) -> np.ndarray:
        given = self._lib.llama_get_logits_ith(self.llama._ctx, -1)
        return np.frombuffer(self._ffi.buffer(given, 4 * self.llama.n_vocab), dtype=np.float32).copy()


CHAT = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 100},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": False},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "llama-llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        }
    },
}  # fmt: skip
needs_llama_cpp = pytest.mark.skipif(bool(missing()), reason=missing() or "it is there")


def tokenizer_of(around: str = "<s> $A") -> PreTrainedTokenizerFast:
    """One of bytes and a few pairs of them, as llama.cpp takes none without pairs."""
    known = json.loads(byte_tokenizer(around).backend_tokenizer.to_str())
    pairs = [["e", "r"], ["a", "y"], ["h", "i"], ["Ġ", "w"]]
    known["model"]["vocab"] |= {"".join(pair): 259 + place for place, pair in enumerate(pairs)}
    known["model"]["merges"] = pairs
    inner = Tokenizer.from_str(json.dumps(known))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHAT, **special)


def base_of(folder: Path, kind: str) -> Path:
    sizes = {
        "vocab_size": 270, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": True,
    }  # fmt: skip
    config = AutoConfig.for_model(kind.partition("-")[0], **{**sizes, **FAMILIES[kind]})
    drawn(lambda: AutoModelForCausalLM.from_config(config), 0).save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


def run_on(folder: Path, small: Any, kind: str = "llama", **settings: Any) -> Path:
    """A finished run of local adapters on a tiny base whose tokens are bytes."""
    base = base_of(folder / "base", kind)
    adapter = {"target_modules": "all-linear", "dropout": 0.0, **settings.pop("adapter", {})}
    config = small.config(
        folder / "c.yaml", base={"name": str(base), "dtype": "float32"}, method={"name": "local"}, rounds=1,
        local={"steps": 20}, adapter=adapter, task={"max_length": 100, "template": "chat"}, **settings,
    )  # fmt: skip
    experiment.train(configfile.load(config), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("kind", FAMILIES)
def test_both_exports_of_a_family(small, llm_fed, tmp_path, kind):
    """transformers reads each model back, so it has the weights of base and adapter; llama.cpp answers from both."""
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    run = run_on(tmp_path, small, kind)
    said = llm_fed("export", run, tmp_path / "out", "--gguf", "--client", "ada", "--client", "bob")
    assert said.code == 0 and "vLLM and LoRAX can serve" in said.err, said
    whole = llm_fed("export", run, tmp_path / "whole", "--merged", "--gguf", "--client", "bob")
    assert (whole.code, whole.out.split()) == (0, [str(tmp_path / "whole" / name) for name in ("base.gguf", "bob")]), (
        whole
    )
    assert {path.name for path in (tmp_path / "whole/bob").iterdir()} == {"model.gguf", "prompt.json", "README.md"}
    assert "llama-server" in (tmp_path / "whole/bob/README.md").read_text()
    adapter = gguf.GGUFReader(tmp_path / "out/ada/adapter.gguf")
    assert adapter.get_field("adapter.type").contents() == "lora"
    assert adapter.get_field("adapter.lora.alpha").contents() == 8
    model = gguf.GGUFReader(tmp_path / "whole/bob/model.gguf")
    assert {each.name for each in adapter.tensors} == {
        f"{each.name}.lora_{part}" for each in model.tensors if ".attn_" in each.name or ".ffn_" in each.name
        for part in "ab" if each.name.endswith("weight") and "norm" not in each.name
    }  # fmt: skip
    ends = [model.get_field(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    assert [end and end.contents() for end in ends] == [2, None]
    if missing():
        return
    base, model = LlamaCpp(tmp_path / "whole/base.gguf"), LlamaCpp(tmp_path / "whole/bob/model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    for text in ("Which bay?", " a\n\tb ", "北京 🙂", "don't where 1234 wwww"):
        assert base.tokens(text) == list(tokenizer(text)["input_ids"])
    for client, chosen in (("ada", base), ("bob", base), ("bob", model)):
        mine = load_client(run / "adapters" / client, str(tmp_path / "base"))
        if chosen is base:
            base.choose(tmp_path / "out" / client / "adapter.gguf")
        for text in ("w20 w21", "Which bay? " * 3):
            (ids,) = mine.base.tokens([text], None)
            logits = chosen.logits(ids)
            expected = _logits(mine, ids)
            assert np.linalg.norm(logits - expected) < 1e-4 * np.linalg.norm(expected), (client, text)
            assert chosen.answer(ids, 8) == list(mine.base.stream(mine.structure, mine.state, ids, 8))
    base.choose(None)
    mine = load_client(run / "adapters/ada", str(tmp_path / "base"))
    assert np.linalg.norm(base.logits(ids) - _logits(mine, ids)) > 1e-2  # the adapter matters
    base.close()
    model.close()


def _logits(mine: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad(), mine.base.bank(mine.structure, mine.state).attached(torch.tensor([0])):
        return mine.base.model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()


@needs_llama_cpp
def test_a_chat_is_put_as_in_training(small, llm_fed, tmp_path):
    pytest.importorskip("gguf", reason="needs gguf")
    run = run_on(tmp_path, small)
    assert llm_fed("export", run, tmp_path / "out", "--merged", "--gguf", "--client", "ada").code == 0
    there = LlamaCpp(tmp_path / "out/ada/model.gguf")
    mine = load_client(run / "adapters/ada", str(tmp_path / "base"))
    put = there.llama.tokenize("<s>user where x</s><s>", add_special=False, parse_special=True)
    assert mine.base.tokens(["where x"], None)[0] == put
    there.close()


def test_what_is_refused(small, llm_fed, tmp_path, finished):
    """Each with a clean twin above; nothing is written."""
    pytest.importorskip("gguf", reason="needs gguf")
    llm_fed("export", finished, tmp_path / "out", "--merged", "--gguf").assert_refused(
        "tokenizer", "convert_hf_to_gguf"
    )
    run = run_on(tmp_path, small, adapter={"target_modules": ["q_proj", "lm_head"]})
    llm_fed("export", run, tmp_path / "out", "--gguf").assert_refused("adapts the head", "--merged --gguf")
    assert llm_fed("export", run, tmp_path / "whole", "--merged", "--gguf", "--client", "ada").code == 0
    llm_fed("export", run, tmp_path / "whole", "--merged", "--gguf", "--client", "bob").assert_refused(
        "base.gguf already"
    )
    assert not (tmp_path / "out").exists()


def test_without_the_library_its_extra_is_named(llm_fed, finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for words in (["--gguf"], ["--merged", "--gguf"]):
        llm_fed("export", finished, tmp_path / "out", *words).assert_refused("the library gguf", ".[gguf]")
    assert llm_fed("export", finished, tmp_path / "out").code == 0


def test_rows_that_llama_cpp_rotates_together_lie_side_by_side():
    """Two heads of six rows: 0 and 3 of a head are rotated together, then 1 and 4, then 2 and 5."""
    config = tiny.build("llama", num_attention_heads=2, num_key_value_heads=2, hidden_size=12, head_dim=6).config
    of, rows = Architecture(config, "LLAMA", None), torch.arange(12.0)
    expected = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert of.ordered("model.layers.0.self_attn.q_proj.bias", rows).tolist() == expected
    assert of.ordered("model.layers.0.self_attn.v_proj.bias", rows).tolist() == rows.tolist()
    assert Architecture(config, "QWEN2", None).ordered("x.k_proj.bias", rows).tolist() == rows.tolist()


SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(gguf_tokens._LLAMA3.replace("{1,3}", "")), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.mark.parametrize("way", SPLITS)
def test_how_a_tokenizer_splits_is_named_or_refused(way):
    inner = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    inner.pre_tokenizer = SPLITS[way]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    if way:
        assert gguf_tokens._way(gguf_tokens._read(tokenizer), "x") == ("gpt2", way)
    else:
        with pytest.raises(UserError, match="way of splitting texts"):
            gguf_tokens.check(tokenizer)


def test_a_family_that_is_not_known_is_refused():
    pytest.importorskip("gguf", reason="needs gguf")
    for kind, changes, words in (
        ("gemma", {}, "of the families"),
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "type dynamic"),
    ):
        with pytest.raises(UserError, match=words):
            Architecture.of(AutoConfig.for_model(kind, **changes))
