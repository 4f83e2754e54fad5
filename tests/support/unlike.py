"""Small federations of image models that may differ, by hand: sites, rounds over the wire, the same models alone."""

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import tiny_images
import torch
from torch import Tensor, nn

from llm_fed.engine.engine import Engine
from llm_fed.federation.uploads import flaws
from llm_fed.method import Method, Upload
from llm_fed.method.site import Site
from llm_fed.models.joined import Answer
from llm_fed.models.structure import Full
from llm_fed.settings.config import LocalConfig
from llm_fed.state import State
from llm_fed.state.outline import skeleton
from llm_fed.state.roles import Given
from llm_fed.state.wire import pack, unpack
from llm_fed.tasks.common import Picture

C, H = tiny_images.CLASSES, 64  # of the CNN and of ResNet-9
LOCAL = LocalConfig(steps=None, epochs=2, batch_size=4, optimizer="adam")
LR = 0.003
PICTURES = tiny_images.pictures(40)


def of_classes(*labels: int) -> list[Picture]:
    """One picture each, all different."""
    left = list(PICTURES)
    return [left.pop(next(i for i, p in enumerate(left) if p.label == label)) for label in labels]


class Federation:
    """A method's sites, and rounds in which every message passes through the wire and the server's checks. `parts`: the
    clients' examples. `architectures`: of the clients' models, in turn; no name for the base, a CNN."""

    def __init__(self, method: Method, *parts: Sequence[Picture], architectures: Sequence[str] = ("",)):
        self.method, self.base = method, tiny_images.cnn()
        self.engine = Engine(self.base)
        self.server = self._site("server", (), "", None)
        self.clients = {
            f"c{k}": self._site(f"c{k}", part, architectures[k % len(architectures)], self.server)
            for k, part in enumerate(parts)
        }
        self.state = method.init(self.server)

    def _site(self, id: str, train: Sequence[Picture], architecture: str, wrapped_for: Site | None) -> Site:
        structure = self.method.wrap(Full((("", architecture),)), wrapped_for)
        site = tiny_images.party(self.base, train, id, structure, LOCAL, LR)
        site.rounds = 4
        return site

    def ask(self, round: int, *names: str) -> list[Upload]:
        """The answers of these clients (default: all) to the server's present state."""
        uploads = []
        for name in names or self.clients:
            self.clients[name].begin(round, LR)
            message = self.message(name)
            content = self.do(self.method.client_update(self.clients[name], message))
            content = unpack(pack(content))
            assert flaws([content], [Given(skeleton(self.method.upload_like(message)))], None) == [""]
            uploads.append(Upload(name, self.clients[name].num_examples, 0, content))
        return uploads

    def step(self, round: int, uploads: list[Upload]) -> None:
        self.server.begin(round, LR)
        self.state = unpack(pack(asyncio.run(self.method.server_update(self.server, self.state, uploads))))

    def round(self, round: int, *names: str) -> list[Upload]:
        uploads = self.ask(round, *names)
        self.step(round, uploads)
        return uploads

    def message(self, name: str) -> Any:
        return unpack(pack(self.method.broadcast(self.state, name)))

    def personal(self, name: str) -> State:
        return self.do(self.method.personalize(self.clients[name], self.message(name)))

    def answers(self, name: str, state: State, pictures: Sequence[Picture]) -> Answer:
        return self.do(self.clients[name].answers(state, pictures))

    def do(self, work: Any) -> Any:
        return tiny_images.answer(self.engine, work)

    # The same by hand

    def batches(self, name: str, examples: Sequence[Picture]) -> list[tuple[Tensor, Tensor]]:
        """Inputs and labels of the client's steps of the round."""
        places = self.clients[name].indices(len(examples))
        return [self.tensors([examples[i] for i in chosen]) for chosen in places]

    def tensors(self, pictures: Sequence[Picture]) -> tuple[Tensor, Tensor]:
        inputs = self.base.prepare(torch.stack([picture.pixels for picture in pictures]))
        return inputs, torch.tensor([picture.label for picture in pictures])

    def module(self, architecture: str, state: State, prefix: str = "") -> nn.Module:
        """The plain model with the entries of `state` that begin with `prefix`, in training mode."""
        made = copy.deepcopy(self.base.model_of(Full((("", architecture),))))
        values = {**state.tensors(), **state.extras}
        mine = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        found = made.load_state_dict(mine, strict=False)
        assert not found.unexpected_keys and all("num_batches" in key for key in found.missing_keys)
        return made.train()


def seen(module: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and what the head reads."""
    read: list[Tensor] = []
    handle = module.head.register_forward_pre_hook(lambda layer, given: read.append(given[0]))  # type: ignore[union-attr, operator]
    logits = module(inputs)
    handle.remove()
    return logits, read[0]


def assert_entries(found: State, module: nn.Module, prefix: str = "", tolerance: float = 1e-11) -> None:
    expected = {f"{prefix}{name}": value for name, value in module.state_dict().items() if value.is_floating_point()}
    values = {name: value for name, value in {**found.tensors(), **found.extras}.items() if name.startswith(prefix)}
    assert values.keys() == expected.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
