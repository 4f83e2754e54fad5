"""Methods and tasks as a researcher brings them: a file in her folder, or an installed package with entry points."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTS = """\
from dataclasses import dataclass
from typing import ClassVar, Optional

from llm_fed.basics.errors import UserError
from llm_fed.merge import mean
from llm_fed.method import Method
"""
# No postponed annotations, as in most files of researchers.
HALF = f'''{IMPORTS}

@dataclass(frozen=True)
class Half(Method):
    """The server goes only a part of the way."""

    paper: ClassVar[str] = "Half (Doe 2026)"
    part: float = 0.5
    decay: Optional[float] = None
    names: tuple[str, ...] = ()

    def __post_init__(self):
        if not 0 < self.part <= 1:
            raise ValueError("part must be above 0 and at most 1")

    async def server_update(self, server, state, uploads):
        step = mean([upload.content for upload in uploads], [upload.num_examples for upload in uploads])
        return state + self.part * step if uploads else state
'''
# Its loss is a method of the class in one round and a function of the module in the next.
SMOOTHED = f'''{IMPORTS}
from functools import partial

from torch.nn.functional import cross_entropy


def smoothed(answer, labels, places, amount):
    return cross_entropy(answer.logits, labels, label_smoothing=amount)


@dataclass(frozen=True)
class Smoothed(Method):
    """FedAvg with smoothed labels."""

    paper: ClassVar[str] = "Smoothed (Doe 2026)"
    whole_models: ClassVar[bool] = True
    amount: float = 0.1

    async def client_update(self, client, message):
        loss = self.loss if client.round % 2 else partial(smoothed, amount=self.amount)
        return await client.fit(message, loss=loss) - message

    def loss(self, answer, labels, places):
        return smoothed(answer, labels, places, self.amount)
'''
TASK = """
from llm_fed.tasks import Task
from llm_fed.tasks.common import ClientData, Example, TaskData


def load(config, seed):
    rows = tuple(Example(f"w{i} w{i + 1}", (f"w{i + 2}",)) for i in range(2, 12))
    clients = {name: ClientData(name, rows[:6], test=rows[6:]) for name in ("x", "y", "z")}
    return TaskData("next", "exact_match", clients)


TASK = Task(load, "exact_match", "3", "made up")
"""


def module(folder: Path, name: str, text: str) -> Path:
    """The file of a module, and of the packages that it is in."""
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in path.relative_to(folder).parents:
        if package.parts:
            (folder / package / "__init__.py").touch()
    path.write_text(text)
    return path


def distribution(folder: Path, name: str, methods: str = "", tasks: str = "") -> None:
    """The metadata of an installed package: lines `name = module:Class`."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[llm_fed.methods]\n{methods}\n[llm_fed.tasks]\n{tasks}\n")


def printed(first_line: str) -> str:
    """The block of Python in CONTRIBUTING.md that begins so, as printed."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    (found,) = (block for block in blocks if block.startswith(first_line))
    return found
