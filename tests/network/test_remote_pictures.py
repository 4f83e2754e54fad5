"""Clients with pictures on other machines, each of which has folders of its own: equal to one process."""

from types import SimpleNamespace
from typing import Any

import every
import numpy as np
import pytest
import tiny_images
import torch
from network import HELLO, NETWORK, NetworkInProcess, assert_same_models, federate, lines
from PIL import Image
from small_run import CLIENTS

from llm_fed.experiment import run as experiment
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.usefixtures("quick")
NAMES = ("ash", "beech", "cedar", "elm")  # of the classes; each client lacks one
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedmerge": {"method": {"name": "fedmerge", "num_models": 2}},
    "fedmoe": {"method": {"name": "fedmoe"}, "base": {"clients": ["cnn", "resnet-9"]}},
    "fedbn": {"method": {"name": "fedbn"}, "base": {"name": "resnet-9"}},
    "adapters": {
        "method": {"name": "fedit"},
        "adapter": {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
        "local": {"lr": 0.02, "lr_end": 0.02},
    },
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> SimpleNamespace:
    """A folder for each client, as `NetworkInProcess` divides it among its nodes, and a checkpoint."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, client in enumerate(CLIENTS):
        pixels, labels = tiny_images.arrays(24, seed=number, classes=len(NAMES), size=16)
        for k, (picture, label) in enumerate(zip(np.asarray(pixels), np.asarray(labels).tolist(), strict=True)):
            if label != number % len(NAMES):
                place = folder / "data" / client / ("test" if k % 3 == 0 else "train") / NAMES[label]
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture.squeeze()).save(place / f"{k}.png")
    tiny_images.save(tiny_images.vit(torch.float32), folder / "vit")
    return SimpleNamespace(data=folder / "data", vit=folder / "vit")


def configured(pictures: SimpleNamespace, name: str, **changes: Any) -> dict[str, Any]:
    settings = tiny_images.tree(pictures.data, rounds=2, network=NETWORK, eval={"every": 1})
    settings["task"] = {
        "name": "images", "path": str(pictures.data), "validation": 0.0, "labels": list(NAMES), "image_size": 16,
    }  # fmt: skip
    for section, values in METHODS[name].items():
        settings[section] = {**(settings.get(section) or {}), **values}
    if name == "adapters":
        settings["base"] = {"name": str(pictures.vit), "dtype": "float32"}
    return settings


@pytest.mark.parametrize("name", every.quick(METHODS, ["adapters", "fedmerge"]))
def test_the_numbers_are_those_of_one_process(pictures, tmp_path, name):
    settings = configured(pictures, name)
    here = experiment.train(from_dict(settings), tmp_path / "run-here" / "run")
    _, there = federate(tmp_path / "there", pictures, settings)
    assert there["round"] == here["round"] and there["scores"]["clients"] == here["scores"]["clients"]
    before, after = (lines(tmp_path / place, "client", "score") for place in ("run-here", "there"))
    assert len(before) == len(after) >= len(CLIENTS)
    for one, other in zip(before, after, strict=True):
        for key in one.keys() - {"losses"}:
            close = isinstance(one[key], float)
            assert one[key] == (pytest.approx(other[key], rel=1e-4) if close else other[key]), key
    assert not (tmp_path / "there/run/adapters").exists()
    assert_same_models(tmp_path / "run-here/run", tmp_path / "there")


def test_a_node_with_other_classes_says_so(pictures, tmp_path, capsys):
    """To its own operator."""
    settings = configured(pictures, "fedavg")
    settings["task"]["labels"] = ["ash", "beech", "cedar"]
    link = NetworkInProcess(tmp_path, pictures, settings)
    (id,) = link.send([(1, HELLO, b"")], 1.0)
    (reply,) = link.receive([id]).values()
    assert reply.error and "elm" not in reply.error
    assert "has the class 'elm', which task.labels does not name; add it there" in capsys.readouterr().out
