"""The scores beside which a run's own are read: of the base without training, and of each client's best rule that
trains nothing (`llm_fed/scoring/rules.py`); both on the test split, once per run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from llm_fed.experiment import samples
from llm_fed.federation.loop import log_base
from llm_fed.runs.folder import Run
from llm_fed.runs.reading import comparable
from llm_fed.scoring.rules import BestRule, best_rule
from llm_fed.scoring.scores import summarize
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict

if TYPE_CHECKING:
    from llm_fed.bench.build import Experiment
    from llm_fed.method.site import Site

Line = Mapping[str, Any]  # of metrics.jsonl


class Baselines:
    """What the runs of one command have scored so far, so that those with the same data and base do so once."""

    def __init__(self) -> None:
        self._bases: dict[str, Line] = {}
        self._answers: dict[str, dict[str, Sequence[Any]]] = {}  # the base's first ones by client, of the same

    def remember(self, config: Config, summary: Line) -> None:
        """Take over what a finished run's summary.json says of the base."""
        if "base" in summary:
            self._bases[shared_by(config, summary["base"]["metric"])] = summary["base"]

    def knows(self, experiment: Experiment) -> bool:
        """Whether the base need not be scored for a run."""
        return shared_by(experiment.config, experiment.metric) in self._bases

    def answers(self, experiment: Experiment) -> Mapping[str, Sequence[Any]]:
        """By client the base's predictions on its first test examples, as far as this command has seen any."""
        return self._answers.get(shared_by(experiment.config, experiment.metric), {})

    def score(self, experiment: Experiment, run: Run) -> dict[str, Any]:
        """The lines `base` and `rule` of a run, as far as it has them, logged unless they are there already."""
        found = {}
        if experiment.scores_base and (line := self._base(experiment, run)):
            found["base"] = line
        if line := rule_line(experiment):
            found["rule"] = _logged(run, line)
        return found

    def _base(self, experiment: Experiment, run: Run) -> dict[str, Any] | None:
        key = shared_by(experiment.config, experiment.metric)
        if key in self._bases:
            return _logged(run, self._bases[key])
        listen = partial(_take, self._answers.setdefault(key, {}), samples.wanted(experiment))
        line = log_base(run, "test", partial(experiment.score_base, listen=listen))
        if line is not None:
            self._bases[key] = line
        return line


def shared_by(config: Config, metric: str) -> str:
    """Equal for runs whose base and rules have the same scores: what these depend on, as a digest."""
    tree = as_dict(config)
    decisive = [
        tree["base"], tree["task"], config.federation_seed, config.seeds.evaluation, config.evaluation_seed, metric,
        config.eval.limit, config.eval.max_new_tokens,
    ]  # fmt: skip
    if config.objective.preferences and not config.objective.refers:  # then rewards are no comparison with the base
        decisive.append(tree["objective"])
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def rule_line(experiment: Experiment, split: str = "test") -> dict[str, Any] | None:
    """The scores of the best rules on a split, and under `rules` which rule each client has.

    None where nobody has examples of it, and with `privacy.clip`: a rule is made of training answers without noise, so
    its name and its score say something of them.
    """
    if experiment.config.privacy.clip is not None:
        return None
    found = {id: rule for id, site in experiment.scored.items() if (rule := _best_rule(experiment, site, split))}
    return line_of(experiment.metric, {id: (rule.name, rule.score) for id, rule in found.items()}, split)


def line_of(metric: str, rules: Mapping[str, tuple[str, float]], split: str = "test") -> dict[str, Any] | None:
    """A line of metrics.jsonl with the name and the score of each client's rule; None without any."""
    if not rules:
        return None
    summary = summarize(metric, {id: score for id, (_, score) in rules.items()})
    scores = {key: value for key, value in summary.as_json().items() if key not in ("loss", "losses")}
    return {
        "kind": "rule",
        "round": 0,
        "split": split,
        **scores,
        "rules": {id: name for id, (name, _) in rules.items()},
    }


def rule_of(
    site: Site, metric: str, limit: int | None, split: str = "test", train: Sequence[Any] | None = None
) -> BestRule | None:
    """The best rule of a site on the first `limit` of its examples of a split; None where it has none.

    Args:
        train: instead of the site's own training examples.
    """
    train = texts_of(site.train) if train is None else train
    return best_rule(train, texts_of(site.data.queries.get(split, ()))[:limit], metric)


def texts_of(encoded: Sequence[Any]) -> Sequence[Any]:
    """The Examples of what was made of them; pictures as they are."""
    return getattr(encoded, "examples", encoded)


def _best_rule(experiment: Experiment, site: Site, split: str) -> BestRule | None:
    train = None
    if site is experiment.server:  # one model for all is tested there: the rule is made of all clients' answers
        train = list(chain.from_iterable(texts_of(client.train) for client in experiment.clients.values()))
    return rule_of(site, experiment.metric, experiment.config.eval.limit, split, train)


def _take(answers: dict[str, Sequence[Any]], most: int, client: str, predictions: Sequence[Any]) -> None:
    if len(answers) < samples.MAX_CLIENTS:
        answers[client] = predictions[:most]


def _logged(run: Run, line: Line) -> dict[str, Any]:
    """The line, logged unless one of its kind is there already."""
    for known in comparable(run.records()):
        if all(known.get(key) == line[key] for key in ("kind", "round", "split")):
            return known
    run.log(line)
    return dict(line)
