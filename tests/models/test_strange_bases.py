"""What is no base, in one line: what people give as one, families that cannot be one, and bases of strangers, of which
what their config.json and tokenizer.json ask for is refused before it is done."""

import json
import os
import shutil
import time
from pathlib import Path

import every_family
import huggingface_hub
import pytest
import tiny_base
from transformers import BertConfig

from llm_fed.basics.errors import UserError
from llm_fed.commands.doctor import known_of
from llm_fed.kinds.language import load_base
from llm_fed.models import families, forms
from llm_fed.models.families import check_family, feels_padding
from llm_fed.models.loading import check_name, read_tokenizer
from llm_fed.settings.config import BaseConfig

# Bases of strangers


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


# What people give as a base


def settings(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))


def moved(folder: Path, to: str) -> None:
    """Everything lies in a folder within."""
    (folder / to).mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(folder / to / path.name)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
FOLDERS = {
    "adapter": (adapter, ["is a PEFT adapter of the base 'Qwen/Qwen3-0.6B'", "base.name=Qwen/Qwen3-0.6B", "--adapter"]),
    "gguf": (lambda f: (f / "model.safetensors").rename(f / "model.gguf"), ["holds GGUF (model.gguf)", "nf4"]),
    "gptq": (lambda f: settings(f, quantization_config={"quant_method": "gptq", "bits": 4}), ["GPTQ", "nf4"]),
    "mlx": (lambda f: settings(f, quantization={"group_size": 64, "bits": 4}), ["MLX", "made from"]),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), ["pickled", "save_pretrained"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["has no config.json", "save_pretrained"]),
    "run": (lambda f: ((f / "config.json").rename(f / "config.yaml"), (f / "metrics.jsonl").touch()), ["run", "start"]),
    "lfs": (lambda f: (f / "model.safetensors").write_text(LFS), ["Git LFS", "model.safetensors", "git lfs pull"]),
    "cache": (lambda f: moved(f, "snapshots/0123abcd"), ["has no config.json", "snapshots/0123abcd, which has one"]),
    "checkpoints": (lambda f: moved(f, "checkpoint-20"), ["has no config.json", "checkpoint-20, which has one"]),
}


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        load_base(BaseConfig(name=name, dtype="float32"), "cpu")
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600 and said.startswith(f"base.name={name!r}"), said
    return said


@pytest.mark.parametrize("form", FOLDERS)
def test_folders(folder, form):
    make, parts = FOLDERS[form]
    make(folder)
    said = refused(str(folder))
    assert all(part in said for part in parts), said


def test_files(folder):
    assert f"give its folder, {folder}" in refused(str(folder / "model.safetensors"))
    for name, part in {"a.gguf": "is a GGUF file", "d.txt": "is a file; give the folder"}.items():
        (folder.parent / name).write_bytes(b"x")
        assert part in refused(str(folder.parent / name))
    assert "there is no such file" in refused("model.gguf") and "there is no such file" in refused("/a/b/c.safetensors")
    adapter(folder)
    assert "is a PEFT adapter" in refused(str(folder / "model.safetensors"))


def test_a_base_is_none_of_these(folder):
    """Also with files beside it that could be taken for another form, and one that is packed by bitsandbytes."""
    for name in ("model.gguf", "params.json", "config.yaml", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    assert load_base(BaseConfig(name=str(folder), dtype="float32"), "cpu").name == str(folder)
    forms.check_quantization("x", {"quantization_config": {"quant_method": "bitsandbytes"}})
    assert check_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B" and check_name("TheBloke/a.gguf") == "TheBloke/a.gguf"


def test_ids_of_the_hub(folder, tmp_path, monkeypatch):
    """As a cache without network has them: an adapter, and a model in GPTQ."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name, make in (("adapter", adapter), ("packed", FOLDERS["gptq"][0])):
        place = tmp_path / f"models--someone--{name}"
        shutil.copytree(folder, place / "snapshots/01ab")
        (place / "refs").mkdir()
        (place / "refs/main").write_text("01ab")
        make(place / "snapshots/01ab")
    assert "is a PEFT adapter of the base 'Qwen/Qwen3-0.6B'" in refused("someone/adapter")
    assert "is quantised with GPTQ" in refused("someone/packed")


@pytest.mark.parametrize("words", [("doctor", "--base"), ("chat", "--base")])
def test_commands_say_so(llm_fed, tmp_path, words):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    said = llm_fed(*words, tmp_path / "m.gguf")
    assert said.code == 2 and "is a GGUF file" in said.err.splitlines()[-1]


# Families


def relabelled(place, **changes):
    """A base whose configuration says that it is of another family; its weights are none."""
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    (place / "model.safetensors").write_bytes(b"")
    return place


@pytest.mark.parametrize(
    ("family", "reason"),
    [("doge", "mixes the tokens of all rows"), ("bert", "is_decoder is false"), ("rwkv", "keeps no cache")],
)
def test_refused_before_weights_are_read(tmp_path, family, reason):
    place = relabelled(tiny_base.folder(tmp_path / "base"), model_type=family)
    with pytest.raises(UserError, match=f"is of the family {family}, which cannot be a base: .*{reason}"):
        load_base(BaseConfig(name=str(place), dtype="float32"), "cpu")


def test_the_doctor_says_so(tmp_path):
    place = relabelled(tiny_base.folder(tmp_path / "base"), model_type="bert")
    with pytest.raises(UserError, match="its tokens see later ones"):
        known_of(str(place))
    clean = {finding["what"]: finding["found"] for finding in known_of(str(tiny_base.folder(tmp_path / "llama")))}
    assert clean["answers in batches"].startswith("prompts of any length together")


def test_an_encoder_that_is_a_decoder_can_be_a_base():
    check_family(BertConfig(is_decoder=True), "mine")
    with pytest.raises(UserError, match=r"base\.name='mine' is of the family bert"):
        check_family(BertConfig(), "mine")


def test_a_family_is_one_or_the_other_and_an_unknown_one_is_not_padded():
    refused = families._ENCODERS | set(families._REFUSED)
    assert not refused & families.PADDED
    assert refused <= set(every_family.FAMILIES)
    unknown = BertConfig()
    unknown.model_type = "of-tomorrow"
    check_family(unknown, "mine")
    assert feels_padding(unknown)
