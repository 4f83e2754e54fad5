"""The end of a run: the round that is tested, test scores, exported models, report and summary."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from llm_fed.basics import checksum, signs
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError
from llm_fed.basics.files import read_file, remove, write_folders
from llm_fed.bench.build import Experiment
from llm_fed.eval.report import write_report
from llm_fed.eval.warning import Warned, sentences
from llm_fed.experiment import watching
from llm_fed.experiment.baselines import Baselines
from llm_fed.export import models
from llm_fed.export.card import model_card
from llm_fed.federation import privacy
from llm_fed.federation.aggregation import trust
from llm_fed.federation.clients import Messages, finish
from llm_fed.federation.progress import Progress, restore
from llm_fed.kinds.encoding import Encodings
from llm_fed.kinds.kind import Shown
from llm_fed.method import Method
from llm_fed.method.client import NOISY_STEPS
from llm_fed.method.requests import succeeded
from llm_fed.method.site import Site
from llm_fed.runs.checkpoint import DamagedCheckpoint
from llm_fed.runs.folder import ENDED, SAMPLES, Run, log_event
from llm_fed.runs.rows import Memory
from llm_fed.runs.tracking import Reporter
from llm_fed.scoring.evaluation import notes_on_length, predict
from llm_fed.scoring.metrics import Prediction
from llm_fed.scoring.scores import ABILITY, METRICS, not_defined
from llm_fed.state.wire import Message

NO_SCORE = "It has none, as the client has no test example."
_SAMPLED = 50  # clients with sample predictions; of more, the first: a page of samples is for looking at
OWN_STEPS = "own steps"
UNMOVED = (
    "the tested models are those that the run began with, as no update has moved them; see whether updates were "
    "refused or late, and whether the method waits for more of them than come (such as method.buffer)"
)


Predictions = Mapping[str, Sequence[Prediction]]  # by client, of its first test examples


def finish_and_deliver(experiment: Experiment, run: Run, progress: Progress, baselines: Baselines) -> dict[str, Any]:
    """Local finishing, test scores, exported adapters and the report."""
    config, before = experiment.config, _remembered(experiment)
    last = progress.ended.round if progress.ended else config.rounds
    with signs.part(signs.FINISHING):
        finish(experiment.method, experiment.trainers, experiment.runtime, run, progress, round=last + 1)
    if config.privacy.by_example:  # what clients finished counts as well
        spent = privacy.spent(config, last, lambda round: 0, experiment.clients.values())
        run.log({"kind": "privacy", "round": last, **spent})
    everybody = {**experiment.clients, **experiment.scored}
    messages = Messages(experiment.method, progress.state, everybody, config.transport)
    after = OWN_STEPS if _remembered(experiment) != before else ""  # a method may have a final step that does nothing
    seen = models.seen(run.records(), progress.round)
    return deliver(experiment, run, messages, progress.round, seen, baselines, after, **facts_of(progress))


def facts_of(progress: Progress) -> dict[str, Any]:
    """What summary.json says of a run that has ended before its last round."""
    return {"ended": asdict(progress.ended)} if progress.ended else {}


def _remembered(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """By client the rows that it remembers."""
    return {id: dict(site.memory.rows) for id, site in experiment.trainers.items() if isinstance(site.memory, Memory)}


def selected_round(experiment: Experiment, run: Run, progress: Progress, reporter: Reporter) -> Progress:
    """The progress after the round that is tested: the best one, or the last."""
    config = experiment.config
    if config.eval.select == "best" and progress.best.round not in (0, progress.round):
        counted = {id: site.memory.get(NOISY_STEPS) for id, site in experiment.clients.items()}
        ended = progress.ended
        try:
            progress = restore(run.checkpoints.load(progress.best.round), experiment.clients, experiment.server)
        except DamagedCheckpoint as error:
            raise RunError(f"{error}; set eval.select=last to use the last round instead of the best") from error
        progress.ended = ended
        for id, steps in counted.items():
            if steps is not None:  # what was spent stays spent, whichever round is tested
                experiment.clients[id].memory[NOISY_STEPS] = steps
    reporter.note(f"testing round {progress.round} of {config.rounds}")
    return progress


def deliver(
    experiment: Experiment,
    run: Run,
    messages: Mapping[str, Message],
    round: int,
    seen: Collection[str],
    baselines: Baselines,
    after: str = "",
    **facts: Any,
) -> dict[str, Any]:
    """Test scores, sample predictions, exported adapters, the report, and last the summary, with further `facts`.

    Args:
        seen: clients of which an answer had arrived by this round.
        after: what was done after the last round, in words; empty where nothing was.
        baselines: of other runs on the same data.
    """
    rows, examples = baselines.score(experiment, run)
    facts |= rows
    with signs.part("test"):
        server = experiment.scored.keys() - experiment.clients.keys()  # which has one model for all, if it is scored
        exported = models.chosen(run.config.export.clients, experiment.scored, {*seen, *server})
        written = set(exported)
        personal = personal_models(experiment, messages, written, run.config.eval.during if after else "test")
        for note in notes_on_length(experiment.scored.values(), experiment.config.eval.max_new_tokens).values():
            log_event(run, round, experiment.server.id, "answers cut", note)
            facts["notes"] = [*facts.get("notes", []), note]
        if personal and all(state.equal(experiment.scored[id].initial()) for id, state in personal.items()):
            log_event(run, round, experiment.server.id, "nothing learned", UNMOVED)
        _score_after(experiment, run, personal, round, after)
        summary = experiment.score(personal, "test", each=True)
        tested = [id for id, site in experiment.scored.items() if site.data.queries.get("test")]
        if tested and not summary:
            log_event(run, round, experiment.server.id, "no score", not_defined(experiment.metric, tested))
    warned = watching.watch(experiment, run, personal, summary, rows, examples)
    with signs.part("the base's answers to the samples"):
        write_samples(experiment, run, summary.predictions if summary else {}, baselines.answers(experiment))
    nowhere = {"unscored": [*experiment.scored], "undefined": tested} if tested else {}
    record: dict[str, Json] = {"kind": "score", "round": round, "split": "test"}
    record |= summary.as_json() if summary else nowhere
    if apart := experiment.apart:
        run.log({"kind": "clients", **apart})
    if summary:
        run.log(record)
    for path in (run.folder / "adapters").glob("*"):
        if path.name not in written and path.is_dir():  # of an earlier end of this run
            remove(path)
    config_text = checksum.uncommented(read_file(run.folder / "config.yaml").decode())
    spent = spent_of(run.records())
    scores = summary.clients if summary else {}
    with signs.part("writing the personal models"):
        sites = (experiment.scored[id] for id in exported)
        beside: Mapping[str, Mapping[str, float]] = summary.beside if summary else {}
        if before := rows.get("base", {}).get("beside", {}).get(ABILITY):
            beside = {**beside, f"{ABILITY} before training": before["clients"]}
        found = contents(experiment, sites, personal, scores, config_text, spent, warned.get("warnings", ()), beside)
        write_folders(((run.folder / "adapters" / id, files) for id, files in found), "a personal model")
    return write_summary(experiment, run, record, round, **facts, **warned)


def write_samples(experiment: Experiment, run: Run, personal: Predictions, base: Predictions) -> None:
    """Write `samples.jsonl`: a line per example, by client in their order. Without any sample there is no file.

    There are none of image models, and none where `privacy.clip` is set: a report is handed on, and samples are texts
    of the clients. RunError: the disk is full. `personal`: of the personal models. `base`: of the base, as far as they
    are known.
    """
    config, model = experiment.config, experiment.base
    most = config.report.samples if config.privacy.clip is None else 0
    clients = [id for id in experiment.scored if id in personal][:_SAMPLED] if most else []
    if not clients or "texts" not in model.reads:
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
    lines, shown = [], Shown(model)
    for id in clients:
        queries = experiment.scored[id].data.queries["test"]
        for number, query in enumerate(asked[id]):
            example = queries.examples[number] if isinstance(queries, Encodings) else None
            lines.append({"client": id, **shown.line(query, answered[id][number], personal[id][number], example)})
    run.write_lines(SAMPLES, lines)


def _score_after(experiment: Experiment, run: Run, personal: Mapping[str, Message], round: int, after: str) -> None:
    """Score what was done after the last round on the split that is scored in training, as its curve ends before. A
    line of its own kind, since no round has this score."""
    during = run.config.eval.during
    if after and during != "test" and (summary := experiment.score(personal, during)):
        run.log({"kind": "after", "round": round, "split": during, "what": after, **summary.as_json()})


def personal_models(
    experiment: Experiment, messages: Mapping[str, Message], exported: Collection[str], also: str = "test"
) -> dict[str, Message]:
    """The personal model of everybody who is tested or exported, or has examples of the split `also`, once for all that
    is done with it: some methods look at every training example for it."""
    wanted = [
        id for id, site in experiment.scored.items()
        if id in exported or site.data.queries.get("test") or site.data.queries.get(also)
    ]  # fmt: skip
    work = {id: experiment.method.personalize(experiment.scored[id], messages[id]) for id in wanted}
    return succeeded(experiment.runtime.run(work))


def spent_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The privacy that was spent, from the lines of metrics.jsonl; None where there was none."""
    line = next((line for line in reversed(lines) if line["kind"] == "privacy"), None)
    return {key: line[key] for key in ("epsilon", "delta", "where", "unit") if key in line} if line else None


def contents(
    experiment: Experiment,
    sites: Iterable[Site],
    personal: Mapping[str, Message],
    scores: Mapping[str, float],
    config_text: str,
    spent: Mapping[str, Json] | None = None,
    warnings: Sequence[Warned] = (),
    beside: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Of each site's personal model its id, and its files with their card by name.

    Args:
        spent: what the run spent of its clients' privacy.
        warnings: of the run.
        beside: what was measured beside the scores, by name and client.
    """
    config, method = experiment.config, experiment.method
    prompt = experiment.base.prompt_of(config)
    looks = type(method).personalize is not Method.personalize
    for site in sites:
        id = site.id
        own = looks or bool(set(site.memory) - {NOISY_STEPS})
        card = model_card(
            models.described(site.structure, experiment.base, site.data.num_labels, prompt),
            client=id, method=config.method["name"], paper=method.paper,
            metrics=({experiment.metric: scores[id]} if id in scores else {})
            | {name: of[id] for name, of in beside.items() if id in of and (name in METRICS or ABILITY in name)},
            config=config_text,
            recipe=method.recipe(site),
            privacy=privacy.statement(config.privacy, spent, site, own) if spent else "", trust=trust(config, method),
            unscored="" if site.data.queries.get("test") else NO_SCORE, warnings=sentences(warnings, id),
        )  # fmt: skip
        yield id, models.contents(personal[id], site.structure, experiment.base, card, prompt)


def write_summary(
    experiment: Experiment, run: Run, record: Mapping[str, Json], round: int, **facts: Json
) -> dict[str, Any]:
    """The report, and last the summary, with the test scores in `record` and further `facts`."""
    config = experiment.config
    result = {"round": round, "rounds": config.rounds, "method": config.method["name"], "scores": record}
    result |= {"examples": experiment.examples, **experiment.apart, **facts}
    if spent := spent_of(run.records()):
        result["privacy"] = spent
    run.mark()
    run.digests.end(round, run.folder)
    run.digests.mark()
    run.lap("after the rounds")
    with signs.part("writing the report"):
        if "ended" in result:
            run.remember(ENDED, result["ended"])
        write_report(run.folder)
    run.conclude(result)
    return result
