"""Sample predictions: the first test examples of each client with the answers of the base and of its personal model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.bench.build import Experiment
from llm_fed.method.requests import Query
from llm_fed.models.loading import Base
from llm_fed.models.prompt import prompt_of
from llm_fed.runs.folder import SAMPLES, Run
from llm_fed.scoring.evaluation import predict
from llm_fed.scoring.scores import METRICS
from llm_fed.tasks.common import Example, Turn, text_of
from llm_fed.tasks.templates import encode_prompt

_SYSTEM, _USER = "Be brief and polite.", "Which one?"  # by which the template is found
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

    @property
    def asked(self) -> int:
        """How many answers there will be."""
        scored = self._experiment.scored
        return sum(min(self._most, len(scored[id].data.queries.get("test", ()))) for id in self._clients)

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
        if not self._taken:
            run.forget(SAMPLES)
            return
        experiment = self._experiment
        base, metric = experiment.base, experiment.metric
        assert isinstance(base, Base)  # `wanted`
        asked = {
            client: experiment.scored[client].data.queries["test"][: len(self._taken[client])]
            for client in self._clients
            if client in self._taken
        }
        answered = self._of_base(asked, known)
        lines, around = [], _Around(experiment)
        for client, queries in asked.items():
            examples = getattr(experiment.scored[client].data.queries["test"], "examples", ())[: len(queries)]
            answers = zip(queries, answered[client], self._taken[client], strict=True)
            for number, (query, alone, own) in enumerate(answers):
                prompt = str(base.tokenizer.decode(query.prompt, skip_special_tokens=True))
                lines.append(
                    {
                        "client": client,
                        "prompt": prompt,
                        **(around.parts(examples[number], prompt) if examples else {}),
                        "references": list(query.answers),
                        "base": _text(base, metric, query, alone),
                        "answer": _text(base, metric, query, own),
                    }
                )
        run.write_lines(SAMPLES, lines)

    def _of_base(
        self, asked: Mapping[str, Sequence[Query]], known: Mapping[str, Sequence[Any]]
    ) -> dict[str, Sequence[Any]]:
        """What the base answers to these, by client."""
        found = {
            id: known[id][: len(queries)] for id, queries in asked.items() if len(known.get(id, ())) >= len(queries)
        }
        experiment = self._experiment
        bare, state = experiment.untrained()
        work = {
            id: predict(bare[id], state, queries, experiment.metric) for id, queries in asked.items() if id not in found
        }
        for id, answer in experiment.runtime.run(work).items():
            if isinstance(answer, Exception):
                raise answer
            found[id] = answer
        return found


def wanted(experiment: Experiment) -> int:
    """How many samples there are of a client at most."""
    config = experiment.config
    return config.report.samples if isinstance(experiment.base, Base) and config.privacy.clip is None else 0


class _Around:
    """What the template puts around prompts, found by prompts of which it is known what they are.

    Attributes:
        _known: by whether there is a system text, what stands before and behind the prompt.
    """

    def __init__(self, experiment: Experiment):
        base = experiment.base
        assert isinstance(base, Base)  # `wanted`
        said = prompt_of(base, experiment.config)
        assert said is not None  # of a language model there is always one
        self._known: dict[bool, tuple[str, str]] = {}
        for system in (False, True):
            turns = [Turn("system", _SYSTEM)] * system + [Turn("user", _USER)]
            with suppress(UserError):  # of a template that takes no system text
                ids = encode_prompt(turns, base.tokenizer, template=said.template)
                before, user, after = str(base.tokenizer.decode(ids, skip_special_tokens=True)).partition(_USER)
                if user and before.count(_SYSTEM) == system:
                    self._known[system] = before.replace(_SYSTEM, "{system}"), after

    def parts(self, example: Example, prompt: str) -> dict[str, str]:
        """The prompt as the data have it (`text`), its system text, if it has one (`system`), and what the template
        puts around both (`template`); nothing where the prompt is not the template with these in it."""
        asked = example.prompt
        turns = [Turn("user", asked)] if isinstance(asked, str) else [*asked]
        system = "\n".join(turn.content for turn in turns if turn.role == "system").strip()
        spoken = [turn for turn in turns if turn.role != "system"]
        if (known := self._known.get(bool(system))) is None:
            return {}
        before, after = known
        begins = prompt.startswith(before.replace("{system}", system)) and spoken[0].content.strip() in prompt
        if not begins or not prompt.endswith(after):
            return {}
        text = spoken[0].content if len(spoken) == 1 else text_of(spoken)
        return {"text": text, "template": f"{before}{{prompt}}{after}"} | ({"system": system} if system else {})


def _text(base: Base, metric: str, query: Query, prediction: Any) -> str:
    """A prediction as text: of log-likelihoods the option that has the highest, and of equal ones the first."""
    if METRICS[metric].scores != "options":
        return str(prediction)
    best = max(range(len(prediction)), key=lambda option: prediction[option])
    return str(base.tokenizer.decode(query.options[best], skip_special_tokens=True)).strip()
