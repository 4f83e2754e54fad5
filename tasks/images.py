"""The tasks of images: one class of several per picture; the data sets of the papers, and your own.

`task.path` is an npz file (`pictures.NPZ_KEYS`), a folder that holds one, a folder of image files (`CLASS/...`,
`train/CLASS/...` and `test/CLASS/...`, either below a folder for each client), or a folder of Parquet files with the
columns of the Hub data set. Without it the pictures come from the Hub (`SOURCES`). Not yet run against the Hub.

A row of `flwrlabs/femnist`: {"image": <28x28 PNG>, "writer_id": "f0000_14", "hsf_id": 0, "character": 10}

Pictures are uint8 and of one size, the data's or `task.image_size` (PIL, bilinear), and all of a task are held in
memory as one tensor. The label names are the data's own, else those here.

- fashion-mnist (Xiao et al. 2017), cifar10 (Krizhevsky 2009): one natural client, to be divided by `task.partition`.
- cifar100: the label is one of 20 superclasses, a Dirichlet partition divides by the 100 fine classes (Feddle paper).
- cifar100-fine: the same pictures, the label is one of the 100 classes (FedMerge, POTARA, FedMoE).
- femnist (Caldas et al. 2018, LEAF): a client per writer; the first 40 of 62 classes alone (Feddle paper, App. D).
- celeba (Liu et al. 2015): a client per celebrity with at least five pictures, as in LEAF; is the person smiling? The
  official split parts celebrities, not pictures, so it is not used.
- isic2019 (Ogier du Terrail et al. 2022, Fed-ISIC2019): skin lesions of 8 classes, a client per centre.
- imagenet (Deng et al. 2009): gated; its test labels are not public, so its validation split is the test split.
- pacs (Li et al. 2017): a client per domain.
- images: your own; `task.path` is needed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llm_fed.basics.errors import UserError
from llm_fed.basics.names import folder_name
from llm_fed.basics.rng import derive
from llm_fed.rows import hub_data
from llm_fed.rows.layout import natural_order
from llm_fed.rows.pictures import Gallery, read_dataset, read_folder, read_npz
from llm_fed.settings import paths
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Picture, TaskData
from llm_fed.tasks.files import chosen
from llm_fed.tasks.partition import SPLITS, kept

if TYPE_CHECKING:
    from datasets import Dataset

METRIC = "accuracy"
ALL = "all"  # the one client of data without clients


@dataclass(frozen=True)
class ImageDataset:
    """Where a data set lies on the Hub, and what a task makes of it."""

    hub: str | None
    columns: Mapping[str, str] = field(default_factory=lambda: {"image": "image", "label": "label"})
    classes: tuple[str, ...] | None = None  # names by label, where the data has none
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"train": ("train",), "test": ("test",)})
    configuration: str | None = None
    first_classes: int | None = None  # pictures of other classes are left out
    fine: bool = False  # an npz file's labels are the classes, whether it has coarse_of_fine or not
    least: int = 1  # pictures of a client; those with fewer are left out

    @property
    def clients(self) -> str:
        if self.hub is None:
            return "as in the data"
        return "one per " + self.columns["client"] if "client" in self.columns else "1"


FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUPERCLASSES = (
    "aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables", "household_electrical_devices",
    "household_furniture", "insects", "large_carnivores", "large_man-made_outdoor_things",
    "large_natural_outdoor_scenes", "large_omnivores_and_herbivores", "medium_mammals", "non-insect_invertebrates",
    "people", "reptiles", "small_mammals", "trees", "vehicles_1", "vehicles_2",
)  # fmt: skip
FINE_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip
CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
LESIONS = (
    "melanoma", "melanocytic nevus", "basal cell carcinoma", "actinic keratosis", "benign keratosis",
    "dermatofibroma", "vascular lesion", "squamous cell carcinoma",
)  # fmt: skip
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")

SOURCES = {
    "fashion-mnist": ImageDataset("zalando-datasets/fashion_mnist", classes=FASHION),
    "cifar10": ImageDataset("uoft-cs/cifar10", {"image": "img", "label": "label"}, CIFAR10),
    "cifar100": ImageDataset(
        "uoft-cs/cifar100", {"image": "img", "label": "coarse_label", "group": "fine_label"}, SUPERCLASSES
    ),
    "cifar100-fine": ImageDataset("uoft-cs/cifar100", {"image": "img", "label": "fine_label"}, FINE_CLASSES, fine=True),
    "femnist": ImageDataset(
        "flwrlabs/femnist", {"image": "image", "label": "character", "client": "writer_id"}, CHARACTERS,
        {"train": ("train",)}, first_classes=40,
    ),
    "celeba": ImageDataset(
        "flwrlabs/celeba", {"image": "image", "label": "Smiling", "client": "celeb_id"}, ("not smiling", "smiling"),
        {"train": ("train", "valid", "validation", "test")}, "img_align+identity+attr", least=5,
    ),
    "isic2019": ImageDataset(
        "flwrlabs/fed-isic2019", {"image": "image", "label": "label", "client": "center"}, LESIONS,
    ),
    "imagenet": ImageDataset("ILSVRC/imagenet-1k", splits={"train": ("train",), "test": ("validation",)}),
    "pacs": ImageDataset(
        "flwrlabs/pacs", {"image": "image", "label": "label", "client": "domain"}, PACS, {"train": ("train",)}
    ),
    "images": ImageDataset(None),
}  # fmt: skip


def load(config: TaskConfig, seed: int, only: int | None = None) -> TaskData:
    """The natural clients, or one named `all` where the data has none. Pictures are decoded last, and only those that
    are needed: with the natural partition those of the clients that take part; with `only` so many of the training
    pictures, drawn by the seed."""
    source = SOURCES[config.name]
    return of_gallery(_read(config, source), source, config, seed, only)


def of_gallery(
    gallery: Gallery, source: ImageDataset, config: TaskConfig, seed: int, only: int | None = None
) -> TaskData:
    """The clients of pictures that are in memory; the other arguments are those of `load`."""
    if source.fine and gallery.groups is not None:
        gallery = dataclasses.replace(gallery, labels=np.array(gallery.groups), classes=None)
    if config.labels is not None:
        gallery = _named(gallery, config.labels)
    classes = gallery.classes or source.classes or tuple(map(str, range(int(gallery.labels.max(initial=0)) + 1)))
    wrong = gallery.labels[(gallery.labels < 0) | (gallery.labels >= len(classes))]
    if len(wrong):
        raise UserError(f"{gallery.where}: the label {wrong[0]} is none of the {len(classes)} classes of {config.name}")
    if "group" in source.columns and gallery.groups is None:
        raise UserError(f"{gallery.where} lacks coarse_of_fine, the superclass of each fine class, for {config.name}")
    classes = classes[: source.first_classes]
    owners = [ALL] * len(gallery.labels) if gallery.clients is None else list(map(_owner, gallery.clients))
    sizes = Counter(owner for owner, label in zip(owners, gallery.labels.tolist(), strict=True) if label < len(classes))
    names = sorted((name for name, size in sizes.items() if size >= source.least), key=natural_order)
    if not names:
        raise UserError(f"{gallery.where} holds no client with {source.least} pictures of {config.name}; see task.path")
    names = list(chosen(config, names))
    if config.partition.kind == "natural":
        names = kept(names, config, seed)
    wanted = set(names)
    taking_part = np.array([owner in wanted for owner in owners], bool)
    rows = np.flatnonzero(taking_part & (gallery.labels < len(classes)))
    if only is not None:
        rows = rows[[gallery.splits[row] == "train" for row in rows.tolist()]]
        if only > len(rows):
            raise UserError(
                f"task.server.examples={only}, but {gallery.where} has {len(rows)} training pictures; lower it"
            )
        drawn = np.random.default_rng(derive(seed, "server", "pictures")).choice(rows, only, replace=False)
        rows = np.sort(drawn)
    return TaskData(config.name, METRIC, _clients(gallery, rows, names, owners, config.image_size), classes)


def _owner(name: str | float) -> str:
    """A client's id: its name, or its number, also where a column with gaps has made a fraction of that."""
    return folder_name(str(int(name) if isinstance(name, float) and name.is_integer() else name))


def _named(gallery: Gallery, labels: tuple[str, ...]) -> Gallery:
    """The gallery with these classes, of which its own are some; numbers stay as they are."""
    if gallery.classes is None:
        return dataclasses.replace(gallery, classes=labels)
    if unknown := [name for name in gallery.classes if name not in labels]:
        raise UserError(f"{gallery.where} has the class {unknown[0]!r}, which task.labels does not name; add it there")
    index = np.array([labels.index(name) for name in gallery.classes], np.int64)
    return dataclasses.replace(gallery, labels=index[gallery.labels], classes=labels)


def noisy(client: ClientData, share: float, classes: int, seed: int) -> ClientData:
    """The client with each training label replaced, with probability `share`, by one drawn from all classes."""
    rng = np.random.default_rng(derive(seed, "noise", client.client))
    hit = rng.random(len(client.train)) < share
    labels = rng.integers(classes, size=len(client.train)).tolist()
    train = (
        dataclasses.replace(picture, label=label) if wrong else picture
        for picture, label, wrong in zip(client.train, labels, hit, strict=True)
    )
    return dataclasses.replace(client, train=tuple(train))


def _read(config: TaskConfig, source: ImageDataset) -> Gallery:
    if config.path is None:
        if source.hub is None:
            raise UserError(f"task.path is not set; the task `{config.name}` needs an npz file or a folder of pictures")
        options = {} if source.configuration is None else {"name": source.configuration}
        return _from_datasets(hub_data(source.hub, **options), source, source.hub)
    path = paths.local("task.path", config.path)
    archives = [path] if path.is_file() else sorted(path.glob("*.npz"))
    if len(archives) > 1:
        raise UserError(f"{path} holds {archives[0].name} and {archives[1].name}; name one of them in task.path")
    if archives:
        return read_npz(archives[0])
    if next(path.rglob("*.parquet"), None):
        return _from_datasets(hub_data(path), source, str(path))
    return read_folder(path)


def _from_datasets(data: Mapping[str, Dataset], source: ImageDataset, where: str) -> Gallery:
    parts = [(split, data[name]) for split, names in source.splits.items() for name in names if name in data]
    if not any(split == "train" and len(part) for split, part in parts):
        raise UserError(f"{where} has no training pictures; its splits are {', '.join(data)}")
    return read_dataset(parts, source.columns, where)


def _clients(
    gallery: Gallery, rows: np.ndarray, names: list[str], owners: list[str], size: int | None
) -> dict[str, ClientData]:
    splits: dict[str, dict[str, list[Picture]]] = {name: {split: [] for split in SPLITS} for name in names}
    for row, pixels in zip(rows.tolist(), gallery.decode(rows, size).unbind(0), strict=True):
        label = int(gallery.labels[row])
        group = str(label if gallery.groups is None else gallery.groups[row])
        splits[owners[row]][gallery.splits[row]].append(Picture(pixels, label, group))
    return {
        name: ClientData(name, **{split: tuple(pictures) for split, pictures in parts.items()})
        for name, parts in splits.items()
    }
