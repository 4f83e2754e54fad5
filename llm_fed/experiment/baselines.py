"""The scores beside which a run's own are read: of the base without training, and of each client's best rule that
trains nothing (`llm_fed/scoring/rules.py`); both on the test split, once per run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fed.basics.errors import UserError
from llm_fed.eval.warning import Examples
from llm_fed.federation.loop import log_base
from llm_fed.kinds.encoding import Encodings
from llm_fed.runs.folder import EXAMPLES, Run
from llm_fed.runs.records import comparable, read_records
from llm_fed.scoring.duplicates import known_answers
from llm_fed.scoring.metrics import Prediction
from llm_fed.scoring.rules import BestRule, best_rule
from llm_fed.scoring.scores import Summary, summarize
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict
from llm_fed.tasks.common import Example

if TYPE_CHECKING:
    from llm_fed.bench.build import Experiment
    from llm_fed.method.site import Site

Line = Mapping[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class _Baseline:
    """The base's scores on the test split, and with them the scores of single examples and its answers, by client."""

    line: Line
    examples: Examples
    answers: Mapping[str, Sequence[Prediction]]


@dataclass
class Baselines:
    """What the runs of one command have scored so far, so that those with the same data and base do so once."""

    _bases: dict[str, _Baseline] = field(default_factory=dict)  # see `shared_by`
    _first: dict[tuple[str, str], Summary | None] = field(default_factory=dict)  # of round 0, by the same and split

    def remember(self, config: Config, summary: Line, folder: Path) -> None:
        """Take over what a finished run says of the base."""
        if "base" in summary:
            examples = read_examples(folder).get("base", {})
            self._bases[shared_by(config, summary["base"]["metric"])] = _Baseline(summary["base"], examples, {})

    def first(self, experiment: Experiment, split: str) -> Summary | None:
        """The base's scores as round 0 of a run."""
        key = shared_by(experiment.config, experiment.metric), split
        if key not in self._first:
            summary = experiment.score_base(split)
            self._first[key] = summary and replace(summary, predictions={})
        return self._first[key]

    def answers(self, experiment: Experiment) -> Mapping[str, Sequence[Prediction]]:
        """By client the base's predictions on its test examples, where this command has seen them."""
        known = self._bases.get(shared_by(experiment.config, experiment.metric))
        return known.answers if known else {}

    def score(self, experiment: Experiment, run: Run) -> tuple[dict[str, Any], dict[str, Examples]]:
        """The lines `base` and `rule` of a run, as far as it has them, logged unless they are there already; and
        likewise the scores of single examples, where they are known."""
        found, examples = {}, {}
        if experiment.scores_base and (base := self._base(experiment, run)):
            found["base"], examples["base"] = _logged(run, base.line), base.examples
        rules = best_rules(experiment)
        if line := rule_line(experiment, rules):
            found["rule"] = _logged(run, line)
            examples["rule"] = {id: rule.examples for id, rule in rules.items()}
        return found, examples

    def _base(self, experiment: Experiment, run: Run) -> _Baseline | None:
        key, scored = shared_by(experiment.config, experiment.metric), list[Summary]()
        if key in self._bases:
            return self._bases[key]

        def score(split: str) -> Summary | None:
            summary = experiment.score_base(split, each=True)
            scored.extend([summary] if summary else [])
            return summary

        known = [line for line in comparable(run.records()) if line["kind"] == "score" and not line["round"]]
        line = next((line for line in known if line["split"] == "test"), None) or log_base(run, "test", score)
        if line is None:
            return None
        examples, answers = (scored[0].examples, scored[0].predictions) if scored else ({}, {})
        most = experiment.config.report.samples  # answers of all examples would stay in memory to the command's end
        self._bases[key] = _Baseline(line, examples, {id: own[:most] for id, own in answers.items()})
        return self._bases[key]


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


def rule_line(experiment: Experiment, rules: Mapping[str, BestRule], split: str = "test") -> dict[str, Any] | None:
    """The scores of the best rules on a split, and under `rules` which rule each client has; on the test split also how
    many answers training has shown. None without any rule."""
    line = line_of(experiment.metric, rules, split)
    known = looked_up(experiment) if line and split == "test" else ""
    return {**line, "look-up": known} if line and known else line


def best_rules(experiment: Experiment, split: str = "test") -> dict[str, BestRule]:
    """By client its best rule, scored on a split. There are none with `privacy.clip`: a rule is made of training
    answers without noise, so its name and its score say something of them."""
    if experiment.config.privacy.clip is not None:
        return {}
    rules, limit = {}, experiment.config.eval.limit
    for id, site in experiment.scored.items():
        train = None
        if site is experiment.server:  # one model for all is tested there: the rule is made of all clients' answers
            train = list(chain.from_iterable(texts_of(client.train) for client in experiment.clients.values()))
        if (rule := rule_of(site, experiment.metric, limit, split, train)) and not math.isnan(rule.score):
            rules[id] = rule
    return rules


def read_examples(folder: Path) -> dict[str, Examples]:
    """The scores of single examples that a finished run has kept: by `own`, `base` and `rule`, and by client; empty
    where there are none that can be read, as of earlier versions."""
    try:
        lines = read_records(folder / EXAMPLES)
    except UserError:
        return {}
    return {name: {line["client"]: line[name] for line in lines if name in line} for name in ("own", "base", "rule")}


def line_of(metric: str, rules: Mapping[str, BestRule], split: str = "test") -> dict[str, Any] | None:
    """A line of metrics.jsonl with the name and the score of each client's rule; None without any."""
    if not rules:
        return None
    summary = summarize(metric, {id: rule.score for id, rule in rules.items()})
    scores = {key: value for key, value in summary.as_json().items() if key not in ("loss", "losses")}
    named = {id: rule.name for id, rule in rules.items()}
    return {"kind": "rule", "round": 0, "split": split, **scores, "rules": named}


def rule_of(
    site: Site, metric: str, limit: int | None, split: str = "test", train: Sequence[Any] | None = None
) -> BestRule | None:
    """The best rule of a site on the first `limit` of its examples of a split; None where it has none. `train`: instead
    of the site's own training examples."""
    train = texts_of(site.train) if train is None else train
    return best_rule(train, texts_of(site.data.queries.get(split, ()))[:limit], metric)


def looked_up(experiment: Experiment) -> str:
    """How many of the clients' test answers training has shown to them, see `known_answers`; empty of pictures and
    labels, and where the clients' data are not here."""
    clients = [*experiment.clients.values()]
    sites = [(texts_of(site.train), texts_of(site.data.queries.get("test", ()))) for site in clients]
    texts = all(isinstance(each, Example) for part in sites for rows in part for each in rows[:1])
    return known_answers(sites) if texts and not any(site.data.num_labels for site in clients) else ""


def texts_of(encoded: Sequence[Any]) -> Sequence[Any]:
    """The Examples of what was made of them; pictures as they are."""
    return encoded.examples if isinstance(encoded, Encodings) else encoded


def _logged(run: Run, line: Line) -> dict[str, Any]:
    """The line, logged unless one of its kind is there already."""
    for known in comparable(run.records()):
        if all(known.get(key) == line[key] for key in ("kind", "round", "split")):
            return known
    run.log(line)
    return dict(line)
