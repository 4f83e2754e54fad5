"""What people give as a base and is none: each form is named in one line, with what to give instead."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import tiny_base

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
