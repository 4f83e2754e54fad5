"""Sample predictions: the first test examples of each client with the answers of the base and of its personal model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm_fed.bench.build import Experiment
from llm_fed.method.requests import Query
from llm_fed.runs.folder import SAMPLES, Run
from llm_fed.scoring.evaluation import predict

MAX_CLIENTS = 50  # of more, the first: a page of samples is for looking at, and the base answers each of them anew


class Samples:
    """The first `report.samples` predictions of each of the first MAX_CLIENTS clients, taken while they are scored.

    There are none of image models, and none where `privacy.clip` is set: a report is handed on, and samples are texts
    of the clients.
    """

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._most = wanted(experiment)
        tested = [id for id, site in experiment.scored.items() if site.data.queries.get("test")]
        self._clients = tested[:MAX_CLIENTS] if self._most else []
        self._taken: dict[str, Sequence[Any]] = {}

    def listen(self, client: str, predictions: Sequence[Any]) -> None:
        """Take what belongs to the samples of a client's predictions on its test examples."""
        if client in self._clients:
            self._taken[client] = predictions[: self._most]

    def write(self, run: Run, known: Mapping[str, Sequence[Any]]) -> None:
        """Write `samples.jsonl`: a line per example, by client in their order, with the base's answers, too. Without
        any sample there is no file.

        Args:
            known: by client the base's predictions on its first test examples, where it has answered them already.

        Raises:
            RunError: the disk is full.
        """
        shown = self._experiment.base.shown(self._experiment.config)
        if not self._taken or shown is None:
            run.forget(SAMPLES)
            return
        experiment = self._experiment
        requested = {
            client: experiment.scored[client].data.queries["test"][: len(self._taken[client])]
            for client in self._clients
            if client in self._taken
        }
        answered = self._of_base(requested, known)
        lines = []
        for client, queries in requested.items():
            examples = getattr(experiment.scored[client].data.queries["test"], "examples", ())[: len(queries)]
            answers = zip(queries, answered[client], self._taken[client], strict=True)
            for number, (query, alone, own) in enumerate(answers):
                example = examples[number] if examples else None
                lines.append({"client": client, **shown.line(query, alone, own, example)})
        run.write_lines(SAMPLES, lines)

    def _of_base(
        self, requested: Mapping[str, Sequence[Query]], known: Mapping[str, Sequence[Any]]
    ) -> dict[str, Sequence[Any]]:
        """What the base answers to these, by client."""
        answers = {
            id: known[id][: len(queries)] for id, queries in requested.items() if len(known.get(id, ())) >= len(queries)
        }
        experiment = self._experiment
        bare, state = experiment.untrained()
        work = {
            id: predict(bare[id], state, queries, experiment.metric)
            for id, queries in requested.items()
            if id not in answers
        }
        for id, answer in experiment.runtime.run(work).items():
            if isinstance(answer, Exception):
                raise answer
            answers[id] = answer
        return answers


def wanted(experiment: Experiment) -> int:
    """How many samples there are of a client at most."""
    config = experiment.config
    return config.report.samples if config.privacy.clip is None and experiment.base.shown(config) is not None else 0
