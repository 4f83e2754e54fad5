"""What people give as a base and is none: each form is named in one line, with what to give instead."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import tiny_base
import torch
from safetensors.torch import load_file

from llm_fed.basics.errors import UserError
from llm_fed.kinds.language import load_base
from llm_fed.models import forms
from llm_fed.models.loading import check_name
from llm_fed.settings.config import BaseConfig


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tiny_base.folder(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "base"))


def settings(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def only(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))


def adapter_alone(folder: Path) -> None:
    only(folder, "tokenizer.json", "tokenizer_config.json")
    adapter(folder)


def gguf(folder: Path) -> None:
    only(folder)
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


def gguf_and_config(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def onnx(folder: Path) -> None:
    (folder / "onnx").mkdir()
    (folder / "model.safetensors").rename(folder / "onnx/model.onnx")


def lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")


def cache(folder: Path) -> None:
    kept = folder / "snapshots/0123abcd"
    kept.mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(kept / path.name)


def checkpoints(folder: Path) -> None:
    inside = folder / "checkpoint-20"
    inside.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(inside / path.name)


def a_run(folder: Path) -> None:
    only(folder)
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_text("")


def original(folder: Path) -> None:
    only(folder, "tokenizer.json")
    (folder / "params.json").write_text("{}")


FOLDERS = {
    "adapter": (adapter, ["is a PEFT adapter of the base 'Qwen/Qwen3-0.6B'", "base.name=Qwen/Qwen3-0.6B", "--adapter"]),
    "adapter alone": (adapter_alone, ["is a PEFT adapter of the base"]),
    "gguf": (gguf, ["holds GGUF (model-Q4_K_M.gguf)", "made from", "nf4"]),
    "gguf and config": (gguf_and_config, ["holds GGUF (model.gguf)"]),
    "gptq": (lambda f: settings(f, quantization_config={"quant_method": "gptq", "bits": 4}), ["GPTQ", "nf4"]),
    "awq": (lambda f: settings(f, quantization_config={"quant_method": "awq"}), ["AWQ", "made from"]),
    "mlx": (lambda f: settings(f, quantization={"group_size": 64, "bits": 4}), ["MLX (4 bits)"]),
    "onnx": (onnx, ["holds ONNX (onnx/model.onnx)", "exported from"]),
    "pickle": (pickled, ["pickle (pytorch_model.bin)", "safetensors", "save_pretrained"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["has no weights", "safetensors"]),
    "tokenizer": (lambda f: only(f, "tokenizer.json", "tokenizer_config.json"), ["holds a tokenizer alone"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["holds weights and a tokenizer, but no config.json"]),
    "lfs": (lfs, ["Git LFS", "model.safetensors", "git lfs pull"]),
    "cache": (cache, ["Hub's cache", "snapshots/0123abcd"]),
    "checkpoints": (checkpoints, ["folders in it have one", "checkpoint-20"]),
    "run": (a_run, ["is the folder of a run", "config.yaml"]),
    "original": (original, ["params.json", "format of transformers"]),
    "empty": (lambda f: only(f), ["has no config.json"]),
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
    for name, parts in {
        "model.safetensors": ["is one file of a model", f"give its folder, {folder}"],
        "tokenizer.json": ["is one file of a model"],
    }.items():
        assert all(part in refused(str(folder / name)) for part in parts)
    for name, part in {
        "a.gguf": "is a GGUF file", "b.bin": "is a file of weights alone", "c.tar.gz": "is an archive",
        "d.txt": "is a file; give the folder",
    }.items():  # fmt: skip
        path = folder.parent / name
        path.write_bytes(b"x")
        assert part in refused(str(path))
    assert "there is no such file" in refused("model.gguf") and "there is no such file" in refused("/a/b/c.safetensors")
    adapter_alone(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    assert "is a PEFT adapter" in refused(str(folder / "adapter_model.safetensors"))


def test_a_base_is_none_of_these(folder):
    """Also with files beside it that could be taken for another form, and one that is packed by bitsandbytes."""
    for name in ("model.gguf", "params.json", "metrics.jsonl", "config.yaml", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    assert check_name(str(folder)) == str(folder)
    assert load_base(BaseConfig(name=str(folder), dtype="float32"), "cpu").name == str(folder)
    forms.check_quantization("x", {"quantization_config": {"quant_method": "bitsandbytes"}})
    assert check_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B" and check_name("TheBloke/a.gguf") == "TheBloke/a.gguf"


def test_ids_of_the_hub(folder, tmp_path, monkeypatch):
    """As a cache without network has them: an adapter, and a model in GPTQ."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name, make in (("adapter", adapter_alone), ("packed", FOLDERS["gptq"][0])):
        place = tmp_path / f"models--someone--{name}"
        shutil.copytree(folder, place / "snapshots/01ab")
        (place / "refs").mkdir()
        (place / "refs/main").write_text("01ab")
        make(place / "snapshots/01ab")
    assert "is a PEFT adapter of the base 'Qwen/Qwen3-0.6B'" in refused("someone/adapter")
    assert "is quantised with GPTQ" in refused("someone/packed")


@pytest.mark.parametrize(
    "words", [("run",), ("eval", "--data", "d.jsonl", "--base"), ("doctor", "--base"), ("chat", "--base")]
)
def test_every_command_says_so(small, llm_fed, tmp_path, words):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    given = [tmp_path / "m.gguf"]
    if words == ("run",):
        given = [small.config(tmp_path / "c.yaml"), f"base.name={tmp_path / 'm.gguf'}", "--out", tmp_path / "run"]
    elif words[0] == "eval":
        (tmp_path / "d.jsonl").write_text('{"question": "a", "answer": "b"}\n')
        words = ("eval", "--data", str(tmp_path / "d.jsonl"), "--base")
    said = llm_fed(*words, *given)
    assert said.code == 2 and "is a GGUF file" in said.err.splitlines()[-1]
