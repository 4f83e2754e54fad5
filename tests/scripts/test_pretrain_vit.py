"""The script that trains a small vision transformer: what it saves, and that it learns."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_images
import torch

from llm_fed.kinds.images import load_images
from llm_fed.settings.config import BaseConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_vit.py"


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture
def make(script, monkeypatch, tmp_path):
    data = tiny_images.npz(tmp_path / "data.npz", size=16)

    def call(folder: str, *words: str) -> Path:
        places = ["--path", str(data), "--out", str(tmp_path / folder)]
        monkeypatch.setattr("sys.argv", ["pretrain_vit", "--task", "images", *places, *words])
        script.main()
        return tmp_path / folder

    return call


def test_it_learns_and_a_federation_loads_what_it_saves(make, capsys):
    folder = make("vit", "--epochs", "25")
    printed = capsys.readouterr().out
    assert "36 pictures" in printed and float(printed.split("accuracy ")[1].split()[0]) > 50  # by chance 25
    base = load_images(BaseConfig(name=str(folder), dtype="float32"), ("0", "1", "2", "3"), "cpu")
    pictures = tiny_images.pictures(18, seed=1, size=16)  # the test split
    logits = base.model(base.prepare(torch.stack([picture.pixels for picture in pictures]))).logits
    right = (logits.argmax(1) == torch.tensor([picture.label for picture in pictures])).float().mean()
    assert f"accuracy {100 * float(right):.2f} on" in printed
    other = load_images(BaseConfig(name=str(folder), dtype="float32"), tuple("abcdef"), "cpu")
    body, same = (model.get_parameter("vit.layernorm.weight") for model in (base.model, other.model))
    assert torch.equal(body, same)
    assert (other.size, other.head, other.pretrained) == (16, "classifier", True)
