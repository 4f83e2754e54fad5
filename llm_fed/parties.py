"""The sites of a run: every client, and the server, with their data as training and evaluation see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llm_fed import tasks
from llm_fed.config import BaseConfig, Config
from llm_fed.encoding import Encoder
from llm_fed.errors import UserError
from llm_fed.eval.clients import check_options, notes_without_credit
from llm_fed.method import Method
from llm_fed.models.images import ImageBase, load_images
from llm_fed.models.loading import Base, load_base
from llm_fed.placement import place
from llm_fed.runtime.launch import choose_device
from llm_fed.site import Site
from llm_fed.structure import Structure, structure_of
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tracking import Reporter


def load(config: Config, task: TaskData, device: str) -> Base | ImageBase:
    """The base that the run's sites share: an image model where the task is one of pictures."""
    if task.labels:
        size = next((picture.pixels.shape[-1] for data in task.clients.values() for picture in data.train), 0)
        return load_images(config.base, task.labels, device, size)
    return load_base(config.base, device)


class Bases:
    """Loads bases as they are asked for, one in memory at a time; `loads` counts them."""

    def __init__(self) -> None:
        self.loads = 0
        self._key: tuple[BaseConfig, str, str, str | None, int | None] | None = None
        self._base: Any = None

    def of(self, config: Config) -> Base | ImageBase:
        task = config.task  # of images, their labels are the head's, and their size may be the model's
        key = config.base, config.device, task.name, task.path, task.image_size
        if key != self._key:
            self._key = self._base = None
            self._base = load(config, tasks.load(task, config.seed), choose_device(config.device))
            self.loads += 1
            self._key = key
        return self._base


def check_kinds(config: Config, task: TaskData, method: Method, metric: str) -> None:
    """Refuse what does not go together, before anything is loaded.

    Raises:
        UserError: what, and what to set.
    """
    pictures = bool(task.labels)
    if not pictures and config.adapter is None:
        raise UserError(
            "adapter is null, which trains a whole model: of image models only; set adapter.rank and "
            "adapter.target_modules"
        )
    if config.local.augment and not pictures:
        raise UserError(f"local.augment is for images, but {config.task.name} is text; leave it out")
    if method.whole_models and not (pictures and config.adapter is None):
        raise UserError(
            f"{config.method['name']} trains whole image models; set adapter=null, and task.name to a task of images"
        )
    if config.base.clients and not (method.any_model and pictures and config.adapter is None):
        raise UserError(
            f"base.clients gives clients image models of their own, and {config.method['name']} needs the same model "
            "at all of them; leave base.clients out, or choose another method"
        )
    if config.adapter is None and (method.needs or "lora" in method.trained + method.shared):
        raise UserError(
            f"{config.method['name']} trains, sends or merges parts of LoRA adapters, but adapter is null; set "
            "adapter.rank"
        )
    if pictures != (metric == "accuracy"):
        given = f"eval.metric={metric}" + ("" if config.eval.metric else ", the default,")
        raise UserError(f"{given} does not fit task.name={config.task.name}; set eval.metric={task.metric} or null")
    if config.eval.base and pictures:
        raise UserError(
            "eval.base=true scores the base as it is before training, and the head of an image model is not trained "
            "then; set eval.base=false"
        )
    if task.server and task.server.test and not method.one_model:
        raise UserError(
            f"task.server.test=true tests one model for all at the server, but {config.method['name']} gives each "
            "client a model of its own; set task.server.test=false"
        )


def build(
    config: Config, task: TaskData, base: Base | ImageBase, method: Method, metric: str, reporter: Reporter
) -> tuple[dict[str, Site], Site]:
    """(clients, server).

    Raises:
        UserError: a client whose examples do not fit, or data that a metric cannot score.
    """
    structure = structure_of(config.adapter, base.head)
    if isinstance(base, ImageBase):
        encoder, task = None, place(task, base.device, reporter)
    else:
        encoder = Encoder(base.tokenizer, config.task, base.prompt and base.prompt.template)

    def site(id: str, data: ClientData | None, labels: int) -> Site:
        wrapped: Structure = method.wrap(structure, None)
        site = Site(id, wrapped, config.local, config.seed, partial(base.draw, wrapped), metric=metric)
        site.num_labels, site.rounds = labels, config.rounds
        if data is None:
            return site
        if encoder is None:
            site.train, site.held_out = data.train, data.validation
            site.queries = {"validation": data.validation, "test": data.test}
        else:
            before = encoder.skipped.copy()
            site.train = encoder.training(id, "training", data.train)
            site.held_out = encoder.training(id, "validation", data.validation, required=False)
            site.queries = {
                split: encoder.queries(id, split, examples, config.eval.limit)
                for split, examples in (("validation", data.validation), ("test", data.test))
            }
            site.left_out = encoder.skipped - before
            if metric == "option_accuracy":
                check_options(site)
        return site

    clients = {id: site(id, data, len(task.labels)) for id, data in task.clients.items()}
    for number, client in enumerate(clients.values()):
        own = config.base.clients[number % len(config.base.clients)] if config.base.clients else ""
        client.structure = method.wrap(structure_of(config.adapter, base.head, own), client)
        client.draw = partial(base.draw, client.structure)
    server = site("server", task.server, len(task.server_labels or task.labels))
    server.clients, server.foreign = tuple(clients), config.task.server.name is not None
    if encoder and (note := encoder.note()):
        reporter.note(note)
    for warning in notes_without_credit([*clients.values(), server], metric):
        reporter.note_once(warning)
    return clients, server


def scored(clients: dict[str, Site], server: Site) -> dict[str, Site]:
    """Who is scored: every client, or the server alone where it holds the test examples."""
    tested: Sequence[Any] = server.queries.get("test", ())
    return {server.id: server} if tested else clients
