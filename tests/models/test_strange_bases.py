"""Bases of strangers: what their config.json and tokenizer.json ask for is refused before it is done."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import tiny_base

from llm_fed.basics.errors import UserError
from llm_fed.kinds.language import load_base
from llm_fed.models.loading import read_tokenizer
from llm_fed.settings.config import BaseConfig


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tiny_base.folder(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "base"))


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "asked",
    [
        {"num_hidden_layers": 10**7},
        {"n_layer": 10**12},
        {"text_config": {"num_hidden_layers": 10**7}},
        {"vision_config": [{"depths": [2, 10**6]}]},
        {"num_local_experts": 10**6},
        {"encoder_layers": 10**5},
        {"vocab_size": 10**12},
        {"hidden_size": 2**40},
    ],
    ids=str,
)
@pytest.mark.parametrize("load", [lambda config: load_base(config, "cpu"), read_tokenizer], ids=["model", "tokenizer"])
def test_absurd_numbers_are_refused_at_once(folder, asked, load):
    change(folder / "config.json", **asked)
    start = time.process_time()
    with pytest.raises(UserError, match="no model has more than"):
        load(BaseConfig(name=str(folder), dtype="float32"))
    assert time.process_time() - start < 5


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("below", [False, True])
def test_a_base_does_not_choose_whose_attention_runs(folder, key, below):
    """transformers would fetch this one from the Hub."""
    named = {key: "somebody/attention"}
    change(folder / "config.json", **({"text_config": named} if below else named))
    with pytest.raises(UserError, match=f"{key}='somebody/attention', which may be anybody's code"):
        load_base(BaseConfig(name=str(folder), dtype="float32"), "cpu")


@pytest.mark.parametrize("declared", [1e308, "x", [{}, 2.5], None])
def test_what_declares_no_tokens_ends_no_answer(folder, declared):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    tokenizer, ends, _ = read_tokenizer(BaseConfig(name=str(folder), dtype="float32"))
    assert ends == {tokenizer.eos_token_id}


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("without_end", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_what_has_no_end_is_not_read(folder, file, without_end):
    (folder / file).unlink(missing_ok=True)
    without_end(folder / file)
    for load in (lambda config: load_base(config, "cpu"), read_tokenizer):
        with pytest.raises(UserError, match=f"has no file in the place of {file}"):
            load(BaseConfig(name=str(folder), dtype="float32"))


def test_a_tokenizer_that_panics_is_an_error(folder):
    """A panic of Rust's is no Exception."""
    single = [{"SpecialToken": {"id": "absent", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    change(folder / "tokenizer.json", post_processor=post)
    with pytest.raises(UserError, match="the tokenizer of .* fails, as its tokenizer.json cannot be used"):
        load_base(BaseConfig(name=str(folder), dtype="float32"), "cpu")
