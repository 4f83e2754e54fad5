"""A client that was never part of a federation gets a personal adapter from a finished run's pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.bench.build import prepare
from llm_fed.commands.evaluate import examples_of, lay_over
from llm_fed.experiment import pool, splits
from llm_fed.experiment.joining import merged_from_pool, merged_with_own
from llm_fed.experiment.merging import write_adapter
from llm_fed.experiment.pool import Pool
from llm_fed.kinds import Kind
from llm_fed.kinds.language import load_base
from llm_fed.method.merge import Merge
from llm_fed.method.requests import succeeded
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.runs.reading import read_config
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device
from llm_fed.settings.config import Config, EvalConfig, TaskConfig, check
from llm_fed.state import State
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.record import Record
from llm_fed.tasks.splits import ByContent

SHOWN = 5  # weights on a terminal, the largest


def for_terminal(recipe: Mapping[str, Any]) -> list[str]:
    """A few lines on what a new client's adapter was made of."""
    weights = sorted(recipe.get("weights", {}).items(), key=lambda item: -item[1])
    shown = ", ".join(f"{weight:.2f} {name}" for name, weight in weights[:SHOWN] if weight >= 0.005)
    lines = {"pool": recipe["pool"], "weights": shown}
    if "loss" in recipe:
        lines["loss"] = (
            f"{recipe['loss']:.3f} nats per target token on {recipe['examples']} examples "
            f"({recipe['loss_of_equal_weights']:.3f} with equal weights)"
        )
    return [f"{what:<9}{words}" for what, words in lines.items() if words]


def join(
    run: Path, data: Path, out: Path, *, examples: int = 16, steps: int | None = None, words: Sequence[str] = ()
) -> dict[str, Any]:
    """Give the owner of a file a personal adapter from the pool of a finished run, and write it to `out`; how it was
    made. UserError: the run has no pool, the file has no usable example, or `out` is there already. RunError: training
    failed, or `out` cannot be written.

    Args:
        data: a file of examples, as a client of the run would have it.
        examples: at most so many of them, drawn at random, decide the weights.
        steps: of training on all of them with the run's `local` settings; of a method that merges a federated adapter
            with a local one, of the local one.
        words: `key=value` words laid over the run's configuration, see `evaluate.lay_over`.
    """
    reporter = Reporter()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists; give another --out")
    config = lay_over(read_config(run), words, "the run folder", also=("local.",))
    check(config)
    pool.check(run, config)
    client = examples_of(data, config.task)
    base = load_base(config.base, choose_device(config.device))
    offered = pool.read(run, config, base)
    known = splits.known(run, config).all
    state, structure, recipe = _personal(config, base, offered, client, examples, steps, reporter, known)
    recipe = {"run": run.resolve().name, "pool": offered.what, **recipe}
    if config.privacy.clip is not None:
        recipe["note"] = f"the noise of the run does not cover the examples of {client.client}"
    write_adapter(out, config, base, client.client, (state, structure), 0, recipe, base.prompt_of(config))
    return recipe


def _personal(
    config: Config,
    base: Kind,
    offered: Pool,
    client: ClientData,
    examples: int,
    steps: int | None,
    reporter: Reporter,
    known: Record | None,
) -> tuple[State, Structure, dict[str, Any]]:
    """The new client's adapter, its structure, and how it was made. `known`: the rows that the run knows, so that none
    is held out that it has trained on."""
    name, method = client.client, methods.build(config.method)
    assert isinstance(offered.structure, Lora)  # a pool holds adapters
    held_out, start = (config.task.validation, config.start) if isinstance(method, Merge) else (0.0, None)
    (divided,) = ByContent(config.seed, known).hold_out([ClientData(name, client.test)], "validation", held_out)
    alone, task = _alone(config, offered.structure, start), TaskData("files", "rouge1", {name: divided})
    experiment = prepare(alone, reporter, base=base, task=task)
    (site,) = experiment.clients.values()
    site.begin(config.rounds + 1, config.local.lr)
    if isinstance(method, Merge):
        work = merged_with_own(site, method, offered, steps)
        if steps is None:
            reporter.note(
                f"{config.method['name']} merges the federated adapter with a local one, which --steps K would train; "
                "without it the client gets the federated one"
            )
    else:
        work = merged_from_pool(site, offered, examples, steps)
    return succeeded(experiment.runtime.run({name: work}))[name]


def _alone(config: Config, structure: Lora, start: str | None) -> Config:
    """The configuration of one client of the run by itself."""
    task, evaluation = config.task, config.eval
    return Config(
        seed=config.seed, seeds=config.seeds, device=config.device, base=config.base, local=config.local,
        adapter=replace(structure.as_config(), start=start), method={"name": "local"},
        task=TaskConfig(
            "files", max_length=task.max_length, too_long=task.too_long, template=task.template, loss_on=task.loss_on
        ),
        eval=EvalConfig(batch_size=evaluation.batch_size, max_new_tokens=evaluation.max_new_tokens),
    )  # fmt: skip
