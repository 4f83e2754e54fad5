"""A client that was never part of a federation gets a personal adapter from a finished run's pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed import methods
from llm_fed.basics import documents
from llm_fed.basics.errors import ClientError, RunError, UserError
from llm_fed.bench.build import prepare
from llm_fed.commands.evaluate import examples_of, lay_over
from llm_fed.experiment import pool, splits
from llm_fed.experiment.joining import way
from llm_fed.experiment.pool import Pool
from llm_fed.export import models
from llm_fed.export.card import model_card
from llm_fed.kinds import Kind
from llm_fed.kinds.language import load_base
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.runs.reading import read_config
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import choose_device
from llm_fed.settings.config import Config, EvalConfig, TaskConfig, check
from llm_fed.settings.configfile import as_dict
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
    run: Path,
    data: Path,
    out: Path,
    *,
    examples: int = 16,
    steps: int | None = None,
    words: Sequence[str] = (),
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
    prompt = base.prompt_of(config)
    card = model_card(
        models.described(structure, base, 0, prompt), client=client.client,
        method=config.method["name"], paper=methods.build(config.method).paper, metrics={},
        config=documents.dump(as_dict(config)), recipe=recipe,
    )  # fmt: skip
    models.write(out, state, structure, base, card, prompt)
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
    name, joins = client.client, way(config, offered, examples, steps)
    assert isinstance(offered.structure, Lora)  # a pool holds adapters
    (divided,) = ByContent(config.seed, known).hold_out([ClientData(name, client.test)], "validation", joins.validation)
    experiment = prepare(
        _alone(config, offered.structure, joins.start),
        reporter,
        base=base,
        task=TaskData("files", "rouge1", {name: divided}),
    )
    (site,) = experiment.clients.values()
    site.begin(config.rounds + 1, config.local.lr)
    if joins.note:
        reporter.note(joins.note)
    (outcome,) = experiment.runtime.run({name: joins.personal(site)}).values()
    if isinstance(outcome, ClientError):
        raise RunError(str(outcome)) from outcome
    if isinstance(outcome, Exception):
        raise outcome
    state, structure, recipe = outcome
    return state, structure, recipe


def _alone(config: Config, structure: Lora, start: str | None) -> Config:
    """The configuration of one client of the run by itself."""
    task = config.task
    return replace(
        Config(),
        seed=config.seed,
        seeds=config.seeds,
        device=config.device,
        base=config.base,
        adapter=replace(structure.as_config(), start=start),
        task=TaskConfig(
            "files", max_length=task.max_length, too_long=task.too_long, template=task.template, loss_on=task.loss_on
        ),
        method={"name": "local"},
        local=config.local,
        eval=EvalConfig(batch_size=config.eval.batch_size, max_new_tokens=config.eval.max_new_tokens),
    )  # fmt: skip
