"""Image tasks: npz files, folders of image files, Parquet files with the Hub's columns; label noise; bad input."""

from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.rows import pictures as pictures_module
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks import images
from llm_fed.tasks.common import Picture


def pictures(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, *shape), dtype=np.uint8)


def split_file(path: Path, shape: tuple[int, ...] = (6, 6), **changed: object) -> Path:
    """x_train, y_train, x_test and y_test with 40 and 20 pictures of ten classes."""
    arrays: dict[str, object] = {
        "x_train": pictures(40, *shape), "y_train": np.arange(40) % 10,
        "x_test": pictures(20, *shape, seed=1), "y_test": np.arange(20) % 10,
    } | changed  # fmt: skip
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})  # type: ignore[arg-type]
    return path


def load(name: str, path: Path | None, seed: int = 0, **settings) -> tasks.TaskData:
    settings.setdefault("validation", 0.0)
    return tasks.load(TaskConfig(name=name, path=None if path is None else str(path), **settings), seed)


def same(found: tuple[Picture, ...], pixels: np.ndarray, labels: np.ndarray) -> bool:
    stacked = torch.stack([picture.pixels for picture in found])
    return torch.equal(stacked, torch.from_numpy(pixels)) and [p.label for p in found] == labels.tolist()


# npz files


def test_grey_pictures_of_a_split_file(tmp_path):
    data = load("fashion-mnist", split_file(tmp_path / "a.npz"))
    (client,) = data.clients.values()
    assert (client.client, data.metric, data.labels) == ("all", "accuracy", images.FASHION)
    assert same(client.train, pictures(40, 1, 6, 6), np.arange(40) % 10)
    assert same(client.test, pictures(20, 1, 6, 6, seed=1), np.arange(20) % 10)
    assert client.train[3].pixels.dtype == torch.uint8 and client.train[3].group == "3"


def test_coloured_pictures_are_channels_first_views_of_one_tensor(tmp_path):
    data = load("cifar10", split_file(tmp_path / "a.npz", (6, 5, 3)))
    client = data.clients["all"]
    assert same(client.train, pictures(40, 6, 5, 3).transpose(0, 3, 1, 2), np.arange(40) % 10)
    storages = {p.pixels.untyped_storage().data_ptr() for p in client.train + client.test}
    assert len(storages) == 1 and len({p.pixels.data_ptr() for p in client.train + client.test}) == 60


def test_cifar100_predicts_superclasses_and_divides_by_fine_classes(tmp_path):
    coarse = (np.arange(100) * 7) % 20
    path = split_file(tmp_path / "a.npz", (4, 4, 3), y_train=np.arange(40) + 60, coarse_of_fine=coarse)
    data = load("cifar100", path)
    assert len(data.labels) == 20
    assert [p.label for p in data.clients["all"].train] == coarse[60:].tolist()
    assert [p.group for p in data.clients["all"].train] == [str(fine) for fine in range(60, 100)]
    with pytest.raises(UserError, match="lacks coarse_of_fine"):
        load("cifar100", split_file(tmp_path / "b.npz", (4, 4, 3)))


def test_the_fine_classes_of_cifar100_can_be_the_labels(tmp_path):
    fine = np.arange(40) + 60
    coarse = split_file(
        tmp_path / "a.npz", (4, 4, 3), y_train=fine, coarse_of_fine=(np.arange(100) * 7) % 20,
        classes=np.array(images.SUPERCLASSES),
    )  # fmt: skip
    for path in (coarse, split_file(tmp_path / "b.npz", (4, 4, 3), y_train=fine)):
        data = load("cifar100-fine", path)
        assert len(data.labels) == 100 and data.labels[60] == "plain"
        assert [(p.label, p.group) for p in data.clients["all"].train] == [(i, str(i)) for i in fine.tolist()]


def test_femnist_keeps_writers_and_the_first_forty_classes(tmp_path):
    labels, writers = np.arange(60) % 45, np.repeat([10, 2, 3], 20)
    test = np.arange(60) % 5 == 0
    np.savez(tmp_path / "a.npz", x=pictures(60, 4, 4), y=labels, client=writers, test=test)
    data = load("femnist", tmp_path / "a.npz")
    assert list(data.clients) == ["2", "3", "10"] and data.labels == images.CHARACTERS[:40]
    for name, client in data.clients.items():
        mine = (writers == int(name)) & (labels < 40)
        assert same(client.train, pictures(60, 1, 4, 4)[mine & ~test], labels[mine & ~test])
        assert same(client.test, pictures(60, 1, 4, 4)[mine & test], labels[mine & test])


def test_pacs_has_a_client_per_domain_and_the_classes_of_the_file(tmp_path):
    np.savez(
        tmp_path / "a.npz", x=pictures(40, 4, 4, 3), y=np.arange(40) % 2, domain=np.repeat([0, 1], 20),
        domains=np.array(["photo", "art"]), classes=np.array(["dog", "guitar"]),
    )  # fmt: skip
    data = load("pacs", tmp_path / "a.npz")
    assert data.labels == ("dog", "guitar")
    assert {name: len(c.train) + len(c.test) for name, c in data.clients.items()} == {"art": 20, "photo": 20}
    assert all(1 <= len(client.test) <= 9 for client in data.clients.values())


BAD = [
    ({"x_test": None}, "it lacks x_test; an npz file holds x_train, y_train"),
    ({"x_train": pictures(40, 6, 6) / 255}, r"x_train is float64 of shape \(40, 6, 6\), not uint8"),
    ({"x_train": pictures(40, 6, 6, 2)}, r"x_train is uint8 of shape \(40, 6, 6, 2\), not"),
    ({"x_train": pictures(39, 6, 6)}, r"y_train is int64 of shape \(40,\), not an integer for each of 39"),
    ({"x_test": pictures(20, 5, 6)}, "cannot be read as pictures: all the input array dimensions"),
    ({"y_train": np.arange(40) % 10 / 2}, r"y_train is float64 of shape \(40,\), not an integer for each of 40"),
    ({"y_train": np.arange(40)}, "the label 10 is none of the 10 classes of fashion-mnist"),
    ({"y_train": np.arange(40) % 10 - 1}, "the label -1 is none of the 10 classes"),
    ({"coarse_of_fine": np.arange(9)}, "do not index the 9 entries of coarse_of_fine"),
    ({"coarse_of_fine": np.arange(10) / 2}, "cannot be read as pictures: Cannot cast"),
    ({"client": np.arange(3)}, r"client is of shape \(3,\), with 60 pictures"),
    ({"y_train": np.array([None] * 40)}, "cannot be read as pictures: Object arrays"),
]  # fmt: skip


@pytest.mark.parametrize("changed, message", BAD)
def test_bad_files_say_what_is_wrong(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        load("fashion-mnist", split_file(tmp_path / "a.npz", **changed))


# Folders of image files


def image_file(path: Path, seed: int, size: tuple[int, int] = (5, 4), mode: str = "RGB") -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = pictures(1, *size, *([3] if mode == "RGB" else []), seed=seed)[0]
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.mark.parametrize("form", ["{}/{}/{}", "site={}/split={}/label={}"])
def test_a_folder_per_client(tmp_path, form):
    for client in ("b", "a"):
        for split, count in (("train", 3), ("test", 2)):
            for i in range(count):
                image_file(tmp_path / form.format(client, split, f"class{i % 2}") / f"{i}.png", i, mode="L")
    data = load("images", tmp_path)
    assert data.labels == ("class0", "class1")
    assert {name: (len(c.train), len(c.test)) for name, c in data.clients.items()} == {"a": (3, 2), "b": (3, 2)}
    assert data.clients["a"].train[0].pixels.shape == (1, 5, 4)


def test_pictures_of_different_sizes_need_image_size(tmp_path):
    image_file(tmp_path / "train/x/1.png", 0)
    image_file(tmp_path / "test/x/1.png", 1, size=(6, 6))
    with pytest.raises(UserError, match="pictures of 6x6 and of 5x4 pixels; set task.image_size"):
        load("images", tmp_path)
    assert load("images", tmp_path, image_size=3).clients["all"].test[0].pixels.shape == (3, 3, 3)


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="pictures found: none .*; all must lie in CLASS/"):
        load("images", tmp_path)
    image_file(tmp_path / "train/x/1.png", 0)
    good = (tmp_path / "train/x/1.png").read_bytes()
    for data, said in (
        (b"no picture", "cannot identify image file"),
        (good[:11] + b"\x04" + good[12:], "Truncated IHDR chunk"),  # a ValueError
    ):
        (tmp_path / "train/x/2.png").write_bytes(data)
        with pytest.raises(UserError, match=f"a picture cannot be read: {said}"):
            load("images", tmp_path)
    (tmp_path / "train/x/2.png").unlink()
    Image.fromarray(np.zeros((5, 4), np.uint16)).save(tmp_path / "train/x/2.png")
    with pytest.raises(UserError, match="more than 8 bits a channel"):
        load("images", tmp_path)
    image_file(tmp_path / "2.png", 0)
    with pytest.raises(UserError, match="e.g. 2.png and train/x/2.png; all must lie in"):
        load("images", tmp_path)


# Parquet files and the Hub


def table(count: int, size: int = 4, **columns: tuple[object, list]) -> datasets.Dataset:
    """An `image` column of PNGs, and columns of (feature, values)."""
    made = [Image.fromarray(pixels) for pixels in pictures(count, size, size, 3)]
    values = {"image": made} | {name: column for name, (_, column) in columns.items()}
    features = {"image": datasets.Image()} | {name: feature for name, (feature, _) in columns.items()}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """Writes a folder as the Hub lays it out."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(**splits: datasets.Dataset) -> Path:
        for split, part in splits.items():
            (tmp_path / "data").mkdir(exist_ok=True)
            part.to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
        return tmp_path / "data"

    return write


def test_celeba_pools_the_splits_and_needs_five_pictures(parquet):
    def part(celebrities: list[int]) -> datasets.Dataset:
        smiling = [i % 2 == 0 for i in range(len(celebrities))]
        return table(len(celebrities), celeb_id=(datasets.Value("int64"), celebrities),
                     Smiling=(datasets.Value("bool"), smiling))  # fmt: skip

    folder = parquet(train=part([7] * 5 + [8] * 4), valid=part([10] * 5), test=part([9] * 6))
    data = load("celeba", folder)
    assert {name: len(c.train) + len(c.test) for name, c in data.clients.items()} == {"7": 5, "9": 6, "10": 5}
    assert {p.label for p in data.clients["7"].train} == {0, 1} and data.labels == ("not smiling", "smiling")


def test_a_wrong_column_or_label_is_refused(parquet):
    with pytest.raises(UserError, match="the label='label' is not a column .the closest is 'labels'"):
        load("isic2019", parquet(train=table(4, labels=(datasets.Value("int64"), [0] * 4))))
    broken = table(4, label=(datasets.Value("int64"), [0, 1, None, 2]), center=(datasets.Value("int64"), [0] * 4))
    with pytest.raises(UserError, match="'label' does not hold a class number in each row"):
        load("isic2019", parquet(train=broken))


@pytest.mark.parametrize("name", [name for name, source in images.SOURCES.items() if source.hub])
def test_the_hub_is_asked_for_the_data_set_of_the_source(name, monkeypatch):
    source = images.SOURCES[name]
    asked = []

    def load_dataset(*given, **options):
        asked.append((*given, options))
        columns = {role: column for role, column in source.columns.items() if role != "image"}
        parts = {}
        for split in {split for names in source.splits.values() for split in names}:
            values = {column: (datasets.Value("int64"), [i % 2 for i in range(20)]) for column in columns.values()}
            named = {"image": source.columns["image"]} if source.columns["image"] != "image" else {}
            parts[split] = table(20, **values).rename_columns(named)
        return datasets.DatasetDict(parts)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    data = load(name, None)
    assert asked == [(source.hub, {"name": source.configuration} if source.configuration else {})]
    assert list(data.clients) == (["0", "1"] if "client" in source.columns else ["all"])
    assert all(client.train and client.test for client in data.clients.values())


# Label noise


def test_noise_replaces_a_share_of_the_training_labels_alone(tmp_path):
    labels = np.arange(4000) % 10
    path = split_file(tmp_path / "a.npz", (2, 2), x_train=pictures(4000, 2, 2), y_train=labels)
    clean = load("fashion-mnist", path, validation=0.25).clients["all"]
    noisy = load("fashion-mnist", path, validation=0.25, noise=0.3).clients["all"]
    pairs = list(zip(clean.train, noisy.train, strict=True))
    changed = [after.label for before, after in pairs if before.label != after.label]
    assert len(changed) / len(pairs) == pytest.approx(0.3 * 0.9, abs=0.02)  # a tenth of the draws is the label itself
    assert np.bincount(changed, minlength=10).min() > len(changed) / 20
    assert all(torch.equal(before.pixels, after.pixels) and before.group == after.group for before, after in pairs)
    for split in ("validation", "test"):
        assert [p.label for p in getattr(clean, split)] == [p.label for p in getattr(noisy, split)]


def test_classes_can_be_given_where_the_data_lacks_some(tmp_path):
    """Numbers of an npz file stay; names of folders get the place that the list gives them."""
    numbered = load("images", split_file(tmp_path / "a.npz"), labels=tuple("abcdefghijklmno"))
    plain = load("images", split_file(tmp_path / "a.npz"))
    labels = [[picture.label for picture in data.clients["all"].train] for data in (numbered, plain)]
    assert numbered.labels == tuple("abcdefghijklmno") and labels[0] == labels[1]
    for name in ("cat", "dog"):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (4, 4), (number, len(name), ord(name[0]))).save(tmp_path / "own" / name / f"{number}.png")
    found = load("images", tmp_path / "own", labels=("dog", "emu", "cat"))
    assert {picture.label for picture in found.clients["all"].train} == {2, 0} and found.labels == ("dog", "emu", "cat")
    with pytest.raises(UserError, match="has the class 'cat', which task.labels does not name; add it there"):
        load("images", tmp_path / "own", labels=("dog", "emu"))
    with pytest.raises(UserError, match="the label [0-9]+ is none of the 1 classes"):
        load("images", split_file(tmp_path / "a.npz"), labels=("a",))


@pytest.mark.parametrize("settings", [{"noise": 0.1}, {"image_size": 32}])
def test_settings_of_images_are_refused_for_text(settings):
    with pytest.raises(UserError, match="are for images, but planted is text"):
        tasks.load(TaskConfig(name="planted", **settings), 0)


# Files of strangers


@pytest.mark.parametrize("label", [30_000_000, 2**40])
def test_labels_that_number_no_class(tmp_path, label):
    path = split_file(tmp_path / "a.npz", y_train=np.array([label] + [0] * 39))
    with pytest.raises(UserError, match="y_train holds the label [0-9]+; a label is the number of a class"):
        load("images", path)


def test_arrays_larger_than_the_memory_are_not_decoded(tmp_path, monkeypatch):
    path = split_file(tmp_path / "a.npz")
    monkeypatch.setattr(pictures_module.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000))
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda file, key: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match="says that its arrays take [0-9,]+ bytes, and this machine has 1,000"):
        load("images", path)
