"""A server that is killed again and again, each time a little later, ends as one that was never interrupted."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import own_steps
import pytest
import tiny_images
from network import NETWORK, NetworkInProcess, federate, lines, tree
from PIL import Image
from safetensors.torch import load_file
from small_run import CLIENTS, SIZES, Small, write_data

from llm_fed.network import server
from llm_fed.network.link import Reply
from llm_fed.runs import digests
from llm_fed.runs.tracking import Reporter

pytestmark = pytest.mark.usefixtures("quick")
LABELS = ("ash", "elm")


class Killed(BaseException):
    """The server's process is gone."""


class Dying(Reporter):
    """Dies as it is told of one more line of metrics.jsonl than so many."""

    def __init__(self, lines: int):
        super().__init__()
        self._left = lines

    def record(self, record: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed


@pytest.fixture(scope="module")
def untested(small, tmp_path_factory) -> Small:
    """The small run's data without validation examples."""
    folder = tmp_path_factory.mktemp("untested") / "data"
    sizes = {split: size for split, size in SIZES.items() if split != "validation"}
    return Small(small.base, write_data(folder, sizes))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "data"
    for number, client in enumerate(CLIENTS):
        pixels, labels = tiny_images.arrays(12, seed=number, classes=len(LABELS), size=8)
        for k, (picture, label) in enumerate(zip(np.asarray(pixels), np.asarray(labels).tolist(), strict=True)):
            place = folder / client / ("test" if k % 3 == 0 else "train") / LABELS[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.squeeze()).save(place / f"{k}.png")
    return folder


def of_text(small: Small, every: int, validation: bool, method: str) -> tuple[Any, dict[str, Any]]:
    whole = {} if validation else {"task": {"validation": 0.0}}
    return small, tree(small, method={"name": method}, eval={"every": every}, **whole)


def of_pictures(data: Path, every: int, validation: float) -> tuple[Any, dict[str, Any]]:
    settings = tiny_images.tree(data, rounds=3, network=NETWORK, eval={"every": every})
    settings["base"] = {"name": "resnet-9"}
    settings["task"] = {
        "name": "images", "path": str(data), "validation": validation, "labels": list(LABELS), "image_size": 8,
    }  # fmt: skip
    return SimpleNamespace(data=data), settings


def models(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("home-*/adapters/**/*.safetensors"))
    return {str(path.relative_to(folder)): load_file(path) for path in files}


def chain(
    folder: Path, small: Any, settings: dict[str, Any], by: str, late: str = "", step: int = 1
) -> tuple[Any, int, NetworkInProcess]:
    """The summary of a run that dies until it is through, how often it did, and its last network; each time it dies
    `step` lines, or orders, later than the time before. `late`: a client whose answers come a round late."""
    for number in count():
        most = step * number
        link = NetworkInProcess(folder, small, settings)
        left, kept = iter(range(most)), dict[str, tuple[int, Reply]]()

        def spoil(order: Any, reply: Any, link: Any = link, left: Any = left, kept: Any = kept) -> Any:
            if by == "orders" and order["kind"] != "hello" and next(left, None) is None:
                raise Killed
            if order["kind"] != "train":
                return reply
            if order["client"] == late:
                kept[order["id"]] = order["round"], reply
                return None
            for id in [id for id, (asked, _) in kept.items() if asked < order["round"]]:
                link.deliver(id, kept.pop(id)[1])
            return reply

        link._spoil = spoil
        reporter = Dying(most) if by == "lines" else None
        try:
            return server.train(link.config, folder / "run", link, reporter=reporter), number, link
        except Killed:
            continue
    raise AssertionError


def same_in_the_end(tmp_path: Path, small: Any, settings: dict[str, Any], by: str) -> None:
    _, whole = federate(tmp_path / "whole", small, settings)
    found, deaths, _ = chain(tmp_path / "killed", small, settings, by)
    assert deaths > 3 and found == whole
    metrics = [(tmp_path / name / "run/metrics.jsonl").read_bytes() for name in ("whole", "killed")]
    assert metrics[0] == metrics[1]
    one, other = models(tmp_path / "whole"), models(tmp_path / "killed")
    assert one.keys() == other.keys() and one
    assert all(one[file][name].equal(other[file][name]) for file in one for name in one[file])


def test_with_text_that_is_scored_after_the_last_round_alone(small, tmp_path):
    """Nodes have memories here, of a version that the server must ask for."""
    small, settings = of_text(small, 0, True, "fedalt")
    same_in_the_end(tmp_path, small, settings | {"rounds": 2}, "lines")


@pytest.mark.slow
def test_with_a_run_that_its_rule_ends(small, tmp_path):
    """With own steps of the clients, and a constant learning rate, it is what a run of two rounds is."""
    settings = tree(
        small, **own_steps.alone(after=5), local={"lr": 0.02, "lr_end": 0.02}, eval={"select": "last"},
        stop={"patience": 1, "min_delta": 100.0},
    )  # fmt: skip
    same_in_the_end(tmp_path, small, settings, "orders")
    _, short = federate(tmp_path / "short", small, settings | own_steps.alone(after=2) | {"stop": {}})
    done = json.loads((tmp_path / "whole/run/summary.json").read_text())
    assert done["ended"]["round"] == 2 and done["scores"] == short["scores"]
    one, other = models(tmp_path / "whole"), models(tmp_path / "short")
    assert one.keys() == other.keys() and one
    assert all(one[file][name].equal(other[file][name]) for file in one for name in one[file])


@pytest.mark.slow
@pytest.mark.parametrize("by", ["lines", "orders"])
@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("of", ["fedit", "fedalt", "fedmerge", "local", "pictures"])
def test_however_it_is_scored(request, tmp_path, of, every, validation, by):
    if of == "pictures":
        small, settings = of_pictures(request.getfixturevalue("pictures"), every, 0.3 if validation else 0.0)
    else:
        data = request.getfixturevalue("small" if validation else "untested")
        small, settings = of_text(data, every, validation, of)
    same_in_the_end(tmp_path, small, settings, by)


def ends_well_with_late_answers(tmp_path: Path, small: Any, method: str, by: str, step: int = 1) -> None:
    """What was under way when the server died is lost with it, so the result is another one than without kills; but
    each answer counts once, and no client goes on from a state that the run does not know."""
    network = {**NETWORK, "patience": 600.0}
    settings = tree(small, method={"name": method}, network=network, rounds=8, eval={"every": 0})
    found, deaths, link = chain(tmp_path, small, settings, by, late="bob", step=step)
    assert deaths > 3 and found["scores"]["clients"].keys() == {*CLIENTS}
    answers = {name: [line for line in lines(tmp_path, "client") if line["client"] == name] for name in CLIENTS}
    assert all(line["staleness"] for line in answers["bob"]) and answers["bob"]
    for name, own in answers.items():
        asked = [line["round"] for line in own]
        assert asked == sorted({*asked}), (name, asked)
        counted = {0, *asked}
        assert {order["after"] for order in link.orders if order.get("client") == name} <= counted
    assert not [line for line in lines(tmp_path, "event") if line["event"] in ("client failed", "refused upload")]
    assert [line["round"] for line in lines(tmp_path, "round")] == [*range(1, 9)]
    assert digests.read(tmp_path / "run", finished=True).flaws == []
    assert {file.split("/")[3] for file in models(tmp_path)} == {*CLIENTS}


def test_with_late_answers(small, tmp_path):
    ends_well_with_late_answers(tmp_path, small, "fedbuff", "lines", step=3)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["lines", "orders"])
@pytest.mark.parametrize("method", ["fedit", "fedalt", "fedasync", "ca2fl", "fedbuff"])
def test_with_late_answers_of_any_method(small, tmp_path, method, by):
    ends_well_with_late_answers(tmp_path, small, method, by)
