"""llm-fed init on pictures: whatever a run reads becomes a configuration that runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llm_fed import tasks
from llm_fed.commands.pictured import holds_pictures
from llm_fed.settings import configfile


def folders(root: Path, *above: str, side: int = 12, count: int = 10, other: int = 0) -> Path:
    """Pictures of two classes in each of the folders; every third is `other` pixels higher."""
    draw = np.random.default_rng(0)
    for folder in above:
        for label in ("ash", "oak"):
            (root / folder / label).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                height = side + other * (number % 3 == 0)
                pixels = draw.integers(0, 255, (height, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / folder / label / f"{number}.png")
    return root


def arrays(path: Path, **more: np.ndarray) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (60, 28, 28), dtype=np.uint8)
    np.savez(path, x=pixels, y=np.arange(60) % 3, **more)
    return path


def test_folders_of_clients_become_a_configuration_that_runs(llm_fed, tmp_path):
    data = folders(tmp_path / "trees", "north", "south", "east")
    (data / "README.md").write_text("trees")
    (data / "labels.csv").write_text("file,label\n1.png,ash\n")
    said = llm_fed("init", data, "--out", tmp_path / "c.yaml")
    assert said.code == 0, said.err
    assert "3: east, north, south" in said.out and "12 x 12 pixels, colour\n" in said.out
    assert "2: ash, oak; the most frequent is ash, 50 % of the pictures" in said.out
    assert "scored by accuracy" in said.out and "compare" in said.out and "chat" not in said.out
    config = configfile.load(tmp_path / "c.yaml")
    assert (config.task.name, config.base.name, config.adapter) == ("images", "cnn", None)
    assert config.task.labels == ("ash", "oak") and config.task.image_size is None
    ran = llm_fed("compare", tmp_path / "c.yaml", "local.batch_size=4", "--out", tmp_path / "table")
    assert ran.code == 0 and "accuracy" in ran.out, ran.err
    rows = json.loads((tmp_path / "table/table.json").read_text())["rows"]
    assert [row["label"] for row in rows] == ["local", "fedlora"]


@pytest.mark.parametrize(
    ("side", "other", "base", "image_size"),
    [(28, 0, "cnn", None), (28, 4, "cnn", 32), (64, 0, "resnet-18", None), (64, 3, "resnet-18", 64),
     (200, 0, "resnet-18", 64)],
)  # fmt: skip
def test_model_and_size_follow_the_pictures(llm_fed, tmp_path, side, other, base, image_size):
    data = folders(tmp_path / "trees", "north", "south", side=side, other=other, count=4)
    assert llm_fed("init", data, "--out", tmp_path / "c.yaml").code == 0
    config = configfile.load(tmp_path / "c.yaml")
    assert (config.base.name, config.task.image_size) == (base, image_size)
    assert len(tasks.load(config.task, 0).clients) == 2


def test_an_npz_file_with_clients_or_without(llm_fed, tmp_path):
    path = arrays(tmp_path / "p.npz", client=np.array([f"c{n % 4}" for n in range(60)]))
    said = llm_fed("init", path, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and "28 x 28 pixels, grey" in said.out and "4: c0, c1, c2, c3" in said.out
    llm_fed("init", path, "--clients", 3, "--out", tmp_path / "d.yaml").assert_refused("says whose they are")
    path = arrays(tmp_path / "q.npz")
    llm_fed("init", path, "--out", tmp_path / "d.yaml").assert_refused(
        "nothing says whose a picture is", "--clients N", "a folder for each client"
    )
    assert llm_fed("init", path, "--clients", 3, "--out", tmp_path / "d.yaml").code == 0
    config = configfile.load(tmp_path / "d.yaml")
    assert config.task.partition.clients == 3 and len(tasks.load(config.task, 0).clients) == 3


def test_what_pictures_do_not_have(small, llm_fed, tmp_path):
    data = folders(tmp_path / "trees", "north", "south", count=3)
    asked = ("init", data, "--out", tmp_path / "c.yaml")
    llm_fed(*asked, "--prompt", "x").assert_refused("pictures, which have no columns, so --prompt would have no effect")
    llm_fed(*asked, "--base", small.base).assert_refused("takes no pictures", "cnn")
    (data / "north/ash/9.png").write_bytes(b"no picture")
    llm_fed(*asked).assert_refused("north/ash/9.png: this picture cannot be opened", "remove it")


def test_pictures_that_are_there_twice_and_labels_that_nobody_trains(llm_fed, tmp_path):
    data = folders(tmp_path / "trees", "north/train", "south/train", count=12)
    for client in ("north", "south"):
        folders(data, f"{client}/test", count=2)  # drawn anew from the same seed: the first is that of training
    (data / "south/test/oak").rename(data / "south/test/elm")
    said = llm_fed("init", data, "--out", tmp_path / "c.yaml")
    assert "test pictures are training pictures, too" in said.out
    assert "tested on labels that they do not train on: south (elm)" in said.out
    clean = llm_fed("init", folders(tmp_path / "clean", "a", "b", count=30), "--out", tmp_path / "d.yaml")
    assert "warning" not in clean.out


def test_texts_beside_pictures_stay_texts(tmp_path):
    folder = folders(tmp_path / "a", "figures", count=1)
    (folder / "north.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    assert not holds_pictures(folder) and holds_pictures(folders(tmp_path / "b", "x", count=1))
    (tmp_path / "b/notes.txt").write_text("a note")
    assert holds_pictures(tmp_path / "b")
