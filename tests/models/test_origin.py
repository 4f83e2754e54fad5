"""Which base something was trained on: a folder of the Hub's cache, a link to it, a copy, a folder of one's own."""

import os
import shutil
from pathlib import Path

import pytest
import tiny
import tiny_base
import torch
from safetensors.torch import load_file, save_file

from llm_fed.kinds.language import load_base
from llm_fed.models.origin import Origin, weights_digest
from llm_fed.settings import paths
from llm_fed.settings.config import BaseConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(base: Path, hub: Path, name: str = "acme/llama-tiny", commit: str = COMMIT) -> Path:
    """A base as the Hub's cache holds it: a snapshot of links to blobs."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs/main").write_text(commit)
    for number, file in enumerate(sorted(base.iterdir())):
        shutil.copyfile(file, folder / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.fixture
def base(tmp_path) -> Path:
    return tiny_base.folder(tmp_path / "base")


def test_a_folder_of_the_hubs_cache_is_its_model_at_its_commit(base, tmp_path, monkeypatch):
    snapshot = cached(base, tmp_path / "hub")
    (tmp_path / "link").symlink_to(snapshot)
    (tmp_path / "chain").symlink_to("link")
    moved = tmp_path / "elsewhere"  # the whole cache lies on another disk
    shutil.copytree(tmp_path / "hub", moved / "hub", symlinks=True)
    (tmp_path / "cache").symlink_to(moved)
    monkeypatch.chdir(snapshot.parent)
    through = tmp_path / "cache/hub/models--acme--llama-tiny/snapshots" / COMMIT
    names = (snapshot, f"{snapshot}/", tmp_path / "link", tmp_path / "chain", COMMIT, through)
    for name in (*names, f"./{COMMIT}/../{COMMIT}"):
        assert paths.hub_snapshot(str(name)) == ("acme/llama-tiny", COMMIT), name
        assert paths.public(str(tmp_path / "link")) == "acme/llama-tiny"
        found = Origin.of(BaseConfig(name=str(name), dtype="float32", quantization="nf4"))
        assert (found.name, found.revision) == ("acme/llama-tiny", COMMIT)
        assert (found.dtype, found.quantization, found.weights) == ("float32", "nf4", weights_digest(base))


def test_a_folder_of_ones_own_is_its_path(base, tmp_path):
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "loop").symlink_to("loop")
    for name in (base, tmp_path / "link", tmp_path / "nothing", tmp_path / "loop"):
        assert paths.hub_snapshot(str(name)) is None
    found = Origin.of(BaseConfig(name=str(base), dtype="float32", revision="v1"))
    assert found == Origin(str(base), dtype="float32", weights=weights_digest(base))
    assert found.public() == Origin("base", dtype="float32", weights=weights_digest(base))
    assert load_base(BaseConfig(name=str(base), dtype="float32"), "cpu").source == found


def test_a_model_from_the_hub_is_known_by_the_commit_that_was_loaded(base, tmp_path, monkeypatch):
    cached(base, tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in (None, "main", COMMIT):
        found = Origin.of(BaseConfig(name="acme/llama-tiny", dtype="bfloat16", revision=revision))
        assert found == Origin("acme/llama-tiny", COMMIT, None, "bfloat16", weights_digest(base))
    unknown = Origin.of(BaseConfig(name="acme/other", dtype="bfloat16", revision="v2"))
    assert unknown == Origin("acme/other", "v2", None, "bfloat16", None)
    assert Origin.of(BaseConfig(name="cnn")) == Origin("cnn", dtype="auto")
    # As a stranger's adapter_config.json may name it; no file system has such a name.
    assert Origin.of(BaseConfig(name="x" * 300)).name == "x" * 300


def test_weights_are_told_apart_by_what_they_hold(base, tmp_path):
    """Not by path, number of files, or age."""
    digest = weights_digest(base)
    assert digest
    shutil.copytree(base, tmp_path / "copy")
    os.utime(tmp_path / "copy/model.safetensors", (1, 1))
    tiny.build("llama").save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_digest(tmp_path / "copy") == weights_digest(tmp_path / "shards") == digest
    for name, change in (("model.norm.weight", lambda tensor: tensor + 1e-3), ("model.norm.weight", torch.Tensor.half)):
        tensors = load_file(base / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file(tensors, tmp_path / "copy/model.safetensors")
        assert weights_digest(tmp_path / "copy") not in (None, digest)
    for damage in (b"", b"\xff" * 99, (base / "model.safetensors").read_bytes()[:60]):
        (tmp_path / "copy/model.safetensors").write_bytes(damage)
        assert weights_digest(tmp_path / "copy") is None
    (tmp_path / "copy/model.safetensors").unlink()
    assert weights_digest(tmp_path / "copy") is None
    (tmp_path / "copy/model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    assert weights_digest(tmp_path / "copy") is None


def test_two_are_the_same_by_weights_or_else_by_the_last_part_of_the_name():
    one = Origin("acme/llama", weights="a")
    assert one.same_weights(Origin("/data/other", weights="a")) and not one.same_weights(
        Origin("acme/llama", weights="b")
    )
    assert one.same_weights(Origin("/data/llama")) and not one.same_weights(Origin("/data/other"))


@pytest.mark.parametrize("values", [None, [], "a", {}, {"name": 5}, {"name": "a", "revision": 5}])
def test_what_is_no_origin(values):
    with pytest.raises(ValueError, match="base"):
        Origin.from_json(values)
