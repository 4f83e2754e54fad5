"""The personal models of a run, and its base, under the tasks of lm-evaluation-harness.

The harness's own model of transformers computes everything; the adapters of all clients lie in one bank around the one
base, and each of its forward passes goes through a client's row. So its numbers are those of `lm_eval --model hf` with
the client's PEFT folder, up to rounding.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llm_fed import kinds
from llm_fed.basics.errors import RunError, UserError, install, one_line, require
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.batch_limits import most_rows
from llm_fed.export.peft_folders import read as read_adapter
from llm_fed.kinds.language import load_base
from llm_fed.models.prompt import prompt_for
from llm_fed.runs.reading import exported, read_config
from llm_fed.runtime.launch import choose_device

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise UserError(f"--harness and llm_fed.harness need lm-evaluation-harness; {install('harness')}") from error

BASE = "base"  # the name of the row without an adapter


class Models:
    """The base of a finished run, and its clients' adapters in one bank for each structure that they have.

    Attributes:
        clients: their names.
        batch_size: of the run's own scores.
    """

    def __init__(self, run: str | Path, clients: Sequence[str] = ()):
        """Raises UserError where the run has no such adapters, or a harness cannot use them."""
        folder = Path(run)
        config, folders = read_config(folder), exported(folder, clients)
        kinds.check_writes(config, f"{folder} trained {{noun}}s, which no harness for language models can score")
        self.base = load_base(config.base, choose_device(config.device))
        self.batch_size = most_rows(config.eval.batch_size, self.base.device)
        self.clients = list(folders)
        self.prompt = prompt_for(self.base, next(iter(folders.values())))
        rows: dict[Any, list[Any]] = {}
        self._rows: dict[str, tuple[Any, int]] = {}
        for client, path in folders.items():
            state, structure = read_adapter(path, self.base)
            if structure.gate == "mix":
                raise UserError(
                    f"{path} weighs two adapters by each prompt, which a harness does not tell from its answer; "
                    "llm-fed eval scores it on the run's own data"
                )
            states = rows.setdefault(structure, [])
            self._rows[client] = structure, len(states)
            states.append(state)
        self._banks = {structure: self.base.engine().bank(structure, states) for structure, states in rows.items()}

    @contextmanager
    def answering(self, client: str | None, rows: int) -> Iterator[None]:
        """Within, a batch of so many rows goes through the base with this client's adapter, or with none."""
        with self.base.computing():
            if client is None:
                yield
                return
            structure, row = self._rows[client]
            bank: AdapterBank = self._banks[structure]
            with bank.attached(torch.full((rows,), row)):
                yield


@register_model("llm_fed")
class LM(HFLM):  # type: ignore[misc]
    """A client's personal model, or the base, for `lm_eval.simple_evaluate(model=LM("runs/mine", "north"), tasks=...)`.

    Args:
        run: the folder of a finished run, or its `Models`, which several of these can share.
        client: whose model; None: the base alone.
        batch_size: rows of a forward pass (default: that of the run's scores).
        more: what the harness's own model of transformers takes, such as `max_length` and `add_bos_token`.

    Raises:
        UserError: the run has no such client, or its models are no single language models.
    """

    def __init__(
        self, run: str | Path | Models, client: str | None = None, *, batch_size: int | str | None = None, **more: Any
    ):
        models = run if isinstance(run, Models) else Models(run, [client] if client else [])
        self._models = models
        self._client = None if client is None else require("client", client, models.clients)
        tokenizer = copy.copy(models.base.tokenizer)
        if models.prompt is not None and models.prompt.template.date is not None:
            # As in training: the run's own form of the base's template.
            tokenizer.chat_template = models.prompt.template.text
            more = {"chat_template_args": {"date_string": models.prompt.template.date}, **more}
        for key in ("device", "dtype", "pretrained", "tokenizer", "peft"):  # the run says them
            more.pop(key, None)
        with _quiet():
            super().__init__(
                pretrained=models.base.model, tokenizer=tokenizer, batch_size=batch_size or models.batch_size, **more
            )

    def _model_call(self, inps: Any, *more: Any, **options: Any) -> Any:
        with self._models.answering(self._client, len(inps)):
            return super()._model_call(inps, *more, **options)

    def _model_generate(self, context: Any, *more: Any, **options: Any) -> Any:
        with self._models.answering(self._client, len(context)):
            return super()._model_generate(context, *more, **options)


def scores(run: Path, tasks: str, limit: int | None = None, clients: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """By model - the base, then each client's - and task what the harness says: its metrics, and their standard errors.

    Args:
        tasks: names of tasks, or paths of YAML files that define some, with commas between them.
        limit: of examples per task.

    Raises:
        UserError: there is no such task, or the run's models cannot be scored so.
        RunError: the harness fails.
    """
    wanted = EvaluatorConfig(tasks=tasks.split(","))
    try:
        manager = wanted.process_tasks()
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"--harness {tasks}: {one_line(str(error))}; `lm_eval ls tasks` lists them") from error
    models, found = Models(run, clients), {}
    for client in (None, *models.clients):
        try:
            with _quiet():
                done = simple_evaluate(
                    model=LM(models, client), tasks=copy.deepcopy(wanted.tasks), limit=limit, task_manager=manager,
                    log_samples=False,
                )  # fmt: skip
        except (ValueError, OSError, KeyError, AssertionError) as error:
            raise RunError(f"lm-evaluation-harness: {one_line(str(error) or repr(error))}") from error
        found[BASE if client is None else client] = {
            task: {key: value for key, value in its.items() if isinstance(value, int | float) and key != "sample_len"}
            for task, its in done["results"].items()
        }
    return found


def columns(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, list[str]]:
    """For a table: by task and metric what each model has there, with its standard error."""
    shown: dict[str, list[str]] = {}
    tasks = next(iter(found.values()))
    for task, metrics in tasks.items():
        for key in metrics:
            name, _, filtered = key.partition(",")
            if name.endswith("_stderr"):
                continue
            label = f"{task} {name}" + (f" ({filtered})" if filtered not in ("", "none") else "")
            error = f"{name}_stderr,{filtered}"
            shown[label] = [
                f"{its[task][key]:.4f}" + (f" ± {its[task][error]:.4f}" if error in its[task] else "")
                for its in found.values()
            ]
    return shown


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's notices on models that are given as objects."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def main() -> None:
    """The harness's command line, which knows `--model llm_fed` then."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except (UserError, RunError) as error:
        print(f"llm_fed.harness: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from error
