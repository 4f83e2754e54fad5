"""Sample predictions: the first test examples of each client with the answers of the base and of its personal model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llm_fed.bench.build import Experiment
from llm_fed.method.requests import succeeded
from llm_fed.runs.folder import SAMPLES, Run
from llm_fed.scoring.evaluation import predict
from llm_fed.scoring.metrics import Prediction

MAX_CLIENTS = 50  # of more, the first: a page of samples is for looking at

Predictions = Mapping[str, Sequence[Prediction]]  # by client, of its first test examples


def write(experiment: Experiment, run: Run, personal: Predictions, base: Predictions) -> None:
    """Write `samples.jsonl`: a line per example, by client in their order. Without any sample there is no file.

    There are none of image models, and none where `privacy.clip` is set: a report is handed on, and samples are texts
    of the clients.

    Args:
        personal: of the personal models.
        base: of the base, as far as they are known.

    Raises:
        RunError: the disk is full.
    """
    config, shown = experiment.config, experiment.base.shown(experiment.config)
    most = config.report.samples if config.privacy.clip is None else 0
    clients = [id for id in experiment.scored if id in personal][:MAX_CLIENTS] if most else []
    if not clients or shown is None:
        run.forget(SAMPLES)
        return
    asked = {id: experiment.scored[id].data.queries["test"][: min(most, len(personal[id]))] for id in clients}
    bare, state = experiment.untrained()
    work = {
        id: predict(bare[id], state, asked[id], experiment.metric)
        for id in clients
        if len(base.get(id, ())) < len(asked[id])
    }
    answered = {**base, **succeeded(experiment.runtime.run(work))}
    lines = []
    for id in clients:
        examples = getattr(experiment.scored[id].data.queries["test"], "examples", None)
        for number, query in enumerate(asked[id]):
            example = examples[number] if examples else None
            lines.append({"client": id, **shown.line(query, answered[id][number], personal[id][number], example)})
    run.write_lines(SAMPLES, lines)
