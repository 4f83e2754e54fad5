"""The sites of a run: every client, and the server, with their data as training and evaluation see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llm_fed.config import Config
from llm_fed.encoding import Encoder
from llm_fed.errors import UserError
from llm_fed.eval.clients import check_options
from llm_fed.method import Method
from llm_fed.models.images import ImageBase, load_images
from llm_fed.models.loading import Base, load_base
from llm_fed.site import Site
from llm_fed.structure import Structure, structure_of
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tracking import Reporter


def load(config: Config, task: TaskData, device: str) -> Base | ImageBase:
    """The base that the run's sites share: an image model where the task is one of pictures."""
    if task.labels:
        return load_images(config.base, task.labels, device)
    return load_base(config.base, device)


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
    if pictures and method.needs:
        raise UserError(
            f"{config.method['name']} merges LoRA adapters of language models, but task.name={config.task.name} is of "
            "images; choose another method"
        )
    if config.adapter is None and "lora" in method.trained + method.shared:
        raise UserError(
            f"{config.method['name']} trains or sends parts of LoRA adapters, but adapter is null; set adapter.rank"
        )
    if pictures != (metric == "accuracy"):
        given = f"eval.metric={metric}" + ("" if config.eval.metric else ", the default,")
        raise UserError(f"{given} does not fit task.name={config.task.name}; set eval.metric={task.metric} or null")
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
    encoder = None if isinstance(base, ImageBase) else Encoder(base.tokenizer, config.task)

    def site(id: str, data: ClientData | None, labels: int) -> Site:
        wrapped: Structure = method.wrap(structure, None)
        site = Site(id, wrapped, config.local, config.seed, partial(base.draw, wrapped), metric=metric)
        site.num_labels = labels
        if data is None:
            return site
        if encoder is None:
            site.train, site.held_out = data.train, data.validation
            site.queries = {"validation": data.validation, "test": data.test}
        else:
            site.train = encoder.training(id, "training", data.train)
            site.held_out = encoder.training(id, "validation", data.validation, required=False)
            site.queries = {
                split: encoder.queries(id, split, examples, config.eval.limit)
                for split, examples in (("validation", data.validation), ("test", data.test))
            }
            if metric == "option_accuracy":
                check_options(site)
        return site

    clients = {id: site(id, data, len(task.labels)) for id, data in task.clients.items()}
    for client in clients.values():
        client.structure = method.wrap(structure, client)
        if encoder is None and not client.structure.plain:
            raise UserError(
                f"{config.method['name']} gives clients several experts, which only language models can have; choose "
                "another method for images"
            )
        client.draw = partial(base.draw, client.structure)
    server = site("server", task.server, len(task.server_labels or task.labels))
    server.clients, server.foreign = tuple(clients), config.task.server.name is not None
    if encoder and (note := encoder.note()):
        reporter.note(note)
    return clients, server


def scored(clients: dict[str, Site], server: Site) -> dict[str, Site]:
    """Who is scored: every client, or the server alone where it holds the test examples."""
    tested: Sequence[Any] = server.queries.get("test", ())
    return {server.id: server} if tested else clients
