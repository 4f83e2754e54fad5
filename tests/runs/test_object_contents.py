"""Digests by value: whatever two objects of one name differ in is seen, and what is equal is equal in every process."""

import functools
import re
import subprocess
import sys
import textwrap
import threading
import types
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config

from llm_fed.settings.object_contents import UNKNOWN, digest, of_object


class Share:
    def __init__(self, give: Any):
        self.give = give

    def __call__(self) -> Any:
        return self.give


class Slotted:
    __slots__ = ("give",)

    def __init__(self, give: Any):
        self.give = give


@dataclass
class Made:
    give: Any
    more: list[int] = field(default_factory=list)


class Kind(Enum):
    ONE = 1
    TWO = 2


def const(give: Any = 0) -> Any:
    return give


def closed(give: Any) -> Any:
    return lambda: give


def default(value: Any) -> Any:
    def metric(give: Any = value) -> Any:
        return give

    return metric


def keyword(value: Any) -> Any:
    def metric(*, give: Any = value) -> Any:
        return give

    return metric


def compiled(text: str) -> Any:
    """The function `metric` of a module with this text."""
    module = types.ModuleType("mine_of_test")
    exec(textwrap.dedent(text), vars(module))
    return module.metric


# Modules whose `metric` depends on {0} in one way each.
SOURCES = (
    "GIVE = {0}\ndef metric(): return GIVE",
    "def inner(): return {0}\ndef outer(): return inner()\ndef metric(): return outer()",
    "def inner(): return {0}\ndef metric(): return [inner() for _ in range(3)]",
    "class A: give = {0}\nclass B(A): pass\ndef metric(): return B().give",
    "class A:\n  @property\n  def give(self): return {0}\nmetric = A()",
    "class A:\n  @staticmethod\n  def give(): return {0}\nmetric = A",
    "import functools\n@functools.lru_cache\ndef metric(): return {0}",
)


def with_attribute(give: Any) -> Any:
    metric = closed(0)
    metric.give = give
    return metric


def cyclic(give: Any) -> Any:
    own = Share(give)
    own.me = own  # type: ignore[attr-defined]
    return own


MAKERS = [
    Share,
    Slotted,
    Made,
    lambda give: Made(0, [give]),
    lambda give: functools.partial(const, give),
    lambda give: functools.partial(const, give=give),
    closed,
    default,
    keyword,
    *(lambda give, source=source: compiled(source.format(give)) for source in SOURCES),
    lambda give: functools.wraps(const)(closed(give)),
    with_attribute,
    lambda give: Share(give).__call__,
    lambda give: closed(closed(Share({"a": [give]}))),
    cyclic,
    lambda give: closed(torch.full((2, 3), float(give))),
    lambda give: closed(torch.full((4, 3), float(give)).t()[:, ::2]),
    lambda give: closed(np.full(3, give)),
    lambda give: closed(np.array([give, "a"], object)),
    lambda give: closed(pd.DataFrame({"a": [give, 2]})),
    lambda give: closed({give}),
    lambda give: closed(frozenset([give])),
    lambda give: closed({np.int64(give)}),
    lambda give: closed(type("Own", (set,), {"give": give})([1])),
    lambda give: types.MethodType(compiled(f"def metric(self): return {give}"), Share(0)),
    lambda give: closed(re.compile(f"a{give}")),
    lambda give: closed(Path(f"a{give}")),
    lambda give: closed(list(Kind)[give]),
    lambda give: (
        nn.Sequential(nn.Linear(2, 2, device="meta", dtype=[torch.float32, torch.float16][give]))[0].weight.dtype
    ),
    lambda give: closed([True, 1][give]),
    lambda give: closed([0.0, -0.0][give]),
    lambda give: closed([1, 1.0][give]),
    lambda give: closed([(1, 2), [1, 2]][give]),
    lambda give: closed(["ab", b"ab"][give]),
    lambda give: closed([functional.gelu, functional.relu][give]),
    lambda give: closed([len, max][give]),
    lambda give: closed(nn.Dropout(give / 4)),
    lambda give: compiled(f"def metric(a, b): return a{'+-'[give]}b"),
    lambda give: compiled(f"def metric({'ab'[give]}): return 0"),
    lambda give: compiled(f"import math\ndef metric(): return math.{['sin', 'cos'][give]}(1)"),
]


@pytest.mark.parametrize("make", MAKERS, ids=range(len(MAKERS)))
def test_what_differs_is_seen_and_what_is_equal_is_not(make):
    first = digest(make(0))
    assert not first.startswith(UNKNOWN) and first == digest(make(0)) and first != digest(make(1))


@pytest.mark.parametrize(
    "thing", [threading.Lock(), (each for each in "ab"), sys.stdout], ids=["lock", "iterator", "file"]
)
def test_what_has_no_value_is_known_as_unknown(thing):
    assert digest(closed(thing)).startswith(UNKNOWN)
    assert digest({"a": frozenset([closed(thing)])}).startswith(UNKNOWN)


PROGRAM = """
import sys
from llm_fed.settings.object_contents import digest
import {package}metric_of_test as m
print(digest(m.metric), digest(m.Own), digest(m.Own(3)), digest(m.late))
"""
METRIC = """
import {package}helper_of_test as helper
from {package}helper_of_test import half
import functools, numpy, re
NAMES = {{"north", "south", "east", "west"}}
class Own(helper.Base):
    def __init__(self, give): self.give, self.names, self.pattern = give, set(NAMES), re.compile("a")
    def compute(self): return half(self.give) + helper.third(3) if self.give in {{1, 2, "c", "d"}} else numpy.mean([1])
def metric(*, predictions, references): return [Own(1).compute() for _ in references]
def late():
    from {package}later_of_test import quarter
    return quarter(1)
"""
HELPER = "class Base:\n  def base(self): return 1\ndef half(x): return x / 2\ndef third(x): return x / 3\n"


@pytest.mark.parametrize("package", ["", "mine_of_test."])
def test_every_process_says_the_same_until_something_is_edited(tmp_path, package):
    """Whatever the order of sets, with compiled files and without; also of code that is imported when it is called."""
    folder = tmp_path / package.rstrip(".")
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").touch()

    def write(name: str, text: str) -> None:
        (folder / f"{name}_of_test.py").write_text(
            text.replace("{package}", package).replace("{{", "{").replace("}}", "}")
        )

    def said(seed: int) -> list[str]:
        for compiled in folder.glob("__pycache__") if seed == 1 else ():
            for path in compiled.iterdir():
                path.unlink()
        environment = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "PYTHONHASHSEED": str(seed)}
        code = PROGRAM.format(package=package)
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    write("metric", METRIC), write("helper", HELPER), write("later", "def quarter(x): return x / 4\n")
    first = said(1)
    assert said(2) == first and not any(each.startswith("unknown") for each in first)
    write("helper", f"# another line\n{HELPER}def unused(): return 0\n")
    assert said(1) == first
    write("helper", HELPER.replace("x / 3", "x / 30"))
    changed = [one != other for one, other in zip(first, said(1), strict=True)]
    assert changed == [True, True, True, False]
    write("helper", HELPER.replace("return 1", "return 2"))
    assert said(1)[1] != first[1]
    write("helper", HELPER), write("later", "def quarter(x): return x / 40\n")
    assert [one != other for one, other in zip(first, said(1), strict=True)] == [False, False, False, True]


class Net(nn.Module):
    def __init__(self, act: Any = functional.relu, form: Any = nn.ReLU, width: int = 3):
        super().__init__()
        self.first, self.second, self.act, self.form = nn.Linear(2, 2), nn.BatchNorm1d(2), act, form()
        self.width = width
        nn.init.ones_(self.first.weight), nn.init.zeros_(self.first.bias)

    def forward(self, x: Any) -> Any:
        return self.act(self.second(self.first(x)))


class Other(Net):
    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_of_a_model_modules_and_forward_count_beside_its_tensors():
    first = of_object("base.name", Net())
    used = Net().train()
    used.eval(), used.first.register_forward_hook(lambda *_: None), used.requires_grad_(False)
    assert of_object("base.name", used) == first
    patched = Net()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    for other in (Net(act=functional.gelu), Net(form=nn.GELU), Net(width=4), Other(), patched, nn.Sequential(Net())):
        assert of_object("base.name", other)["modules"] != first["modules"]
    for config in (dict, GPT2Config):  # of the module's own code, or of one of transformers that it is around
        one, other = Net(), Net()
        one.config, other.config = config(n_layer=2), config(n_layer=3)
        assert of_object("base.name", one) != of_object("base.name", other)
