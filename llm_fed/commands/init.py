"""From a folder of a user's data to a configuration that runs: what was seen in the data, and what follows from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llm_fed import methods, tasks
from llm_fed.basics import documents
from llm_fed.basics.documents import Json, Tree
from llm_fed.basics.errors import UserError, listed
from llm_fed.bench import taking_part
from llm_fed.commands import columns_of, known_base, survey
from llm_fed.commands.columns_of import UserChoices
from llm_fed.commands.known_base import KnownBase, Tell, rates_of
from llm_fed.kinds.sequences import head_for, named_labels
from llm_fed.models import loading
from llm_fed.models.families import writes
from llm_fed.scoring.duplicates import known_answers, near_duplicates
from llm_fed.settings import configfile, paths
from llm_fed.settings.config import LIKELIHOOD, ColumnsConfig, TaskConfig
from llm_fed.tasks.collected import Reading
from llm_fed.tasks.common import Example, TaskData
from llm_fed.tasks.given import has_pictures
from llm_fed.tasks.labelled import number

BASE, ITS_TEMPLATE = "Qwen/Qwen3-0.6B", "chat"
# The method that is proposed for texts, and why in one line; docs/init.md has the measurements. How much is trained.
ALONE = "local"  # also the method of one client, and the one that every other is compared with
WHY = "nothing was shown to be better where clients are unlike; the comparison below says whether sharing helps here"
PASSES, BATCH = 8, 4  # over the training examples of a median client in all; examples per step
STEPS, ROUNDS = (4, 40), (5, 50)  # least and most; a round has half a pass where that lies between them
# Of texts with labels, where the base is an encoder or has a classification head.
LABEL_PASSES, LABEL_BATCH = 10, 16
CLASSES = 20  # different whole numbers up to which they are taken for classes
MOST_LABELS = 100  # that are written into the file
STEP = 8  # tokens to whose multiple the longest text is rounded up
RIVALS = ("fedit", "fedlora", "fedalt")  # what `local` is compared with
MODELS = 4  # of FedMerge's soup, as far as there are clients
# Model types that have layers q_proj and v_proj, on which adapters go.
WITH_THEM = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "olmo2", "smollm3")
FEW = 10  # training examples of a client, below which it is named
SHOWN = 6  # clients in a line


@dataclass(frozen=True)
class Workload:
    """How much a first run trains: enough to learn from the data that are there, and not more than that."""

    rounds: int
    steps: int  # optimizer steps of a client in a round
    batch: int
    clients: int
    passes: float  # over the training examples of a median client

    @classmethod
    def of(cls, sizes: Sequence[int], passes: int, batch: int) -> Workload:
        """For clients with so many training examples."""
        middle = median(sizes)
        one_pass = max(1.0, middle / batch)  # in steps
        wanted = one_pass * passes
        steps = _within(STEPS, math.ceil(max(min(one_pass / 2, STEPS[1] / 2), wanted / ROUNDS[1])))
        rounds = _within(ROUNDS, math.ceil(wanted / steps))
        return cls(rounds, steps, batch, len(sizes), min(batch, middle) * rounds * steps / middle)


def _within(limits: tuple[int, int], number: int) -> int:
    return min(limits[1], max(limits[0], number))


@dataclass(frozen=True)
class Draft:
    """A configuration as text, and what was seen."""

    text: str
    findings: dict[str, str]  # what -> words
    warnings: list[str]
    method: str
    compared: tuple[str, ...]  # the rows of its comparison
    answers: bool = True  # whether one can chat with its models


def draft(given: UserChoices, tell: Tell = lambda line: None) -> Draft:
    """A configuration for the data, with a comment for every choice. UserError: the data cannot be read, neither they
    nor the user say what is what, or there is no such method. `tell`: hears of what takes long, before it does."""
    path, base = paths.local("DATA", given.data), given.base or BASE
    if given.method:
        methods.build({"name": given.method})
    known = known_base.look_up(base, tell) if given.base else None
    if known and known.config is not None and not writes(known.config):
        return _draft_labelled(path, given, base, known)
    try:
        columns, partition, chosen = columns_of.decide(path, given)
    except UserError as error:
        if _holds_pictures(path):
            raise UserError(f"{path} holds pictures; docs/init.md has a configuration for them to copy") from error
        raise
    known = known or known_base.look_up(base, tell)
    named = configfile.section(ColumnsConfig, {**columns})
    with columns_of.said_as_options():
        data = tasks.load(TaskConfig("files", str(path), columns=named, bad_rows="skip", partition=partition), 0)
    reading, remarks, warnings = _seen(data)
    sample = survey.samples(data)
    template = "{prompt}" if reading.texts else _template(base, known)
    if known.problem:
        warnings.append(
            f"{base} cannot be loaded here: {known.problem}. It is taken for a language model that writes texts, whose "
            "lengths and template are unknown: the file leaves task.max_length and eval.max_new_tokens at their "
            "defaults, so give init again with the base at hand"
        )
    enough, about_lengths, longer = _lengths(sample, known, template, survey.number(data))
    warnings += longer
    answers, metric, objective, about_objective = _goal([*chain.from_iterable(sample.values())], reading)
    findings = {
        **about_clients(data, chosen),
        "columns": ", ".join(f"{role} = {name}" for role, name in reading.roles.items()),
        **remarks,
        "alike": near_duplicates(data).words(),
        "look-up": known_answers((client.train, client.test) for client in data.clients.values()),
        "lengths": about_lengths,
        "answers": answers,
        "speed": "" if torch.cuda.is_available() else loading.bfloat16_hint(),
    }
    work = Workload.of(survey.sizes(data), PASSES, BATCH)
    return composed(
        given, data, work, rates_of(known.config, answers=not objective), findings, warnings,
        evaluation={
            "metric": metric,
            "max_new_tokens": None if reading.texts or enough is None else enough.answer,
            "ability": None if objective else True,
        },
        task="files",
        base=base,
        known=known.config is None or known.config.model_type in WITH_THEM,
        columns=columns,
        dealt=partition.clients,
        skipped=len(reading.skipped),
        template=template,
        why=_why(template, known.config is not None),
        max_length=enough.longest if enough else None,
        objective={"name": objective} if objective else None,
        about_objective=about_objective,
        too_long=False,
        about_eval=" `base: false` leaves out the score of the base without an adapter.",
    )  # fmt: skip


def _draft_labelled(path: Path, given: UserChoices, base: str, known: KnownBase) -> Draft:
    """A configuration for labelled texts. UserError: the data cannot be read, a label is none that the base's head has,
    or nothing says whose the rows are."""
    assert known.config is not None  # it writes no texts
    columns, partition, chosen, labels = columns_of.decide_labelled(path, given)
    name = "regression" if are_numbers(labels) else "classification"
    named = configfile.section(ColumnsConfig, {**columns})
    data = tasks.load(TaskConfig(name, str(path), columns=named, bad_rows="skip", partition=partition), 0)
    head_for(known.config, data, base, None)  # it refuses labels that a head with names does not have
    reading, remarks, warnings = _seen(data)
    examples = [*chain.from_iterable(survey.samples(data).values())]
    longest, about_lengths, too_long = _lengths_of_texts(examples, known)
    numbers = name == "regression"
    roles = {"prompt": "text", "input": "second text", "answer": "number" if numbers else "label"}
    findings = {
        **about_clients(data, chosen),
        "columns": ", ".join(f"{roles.get(role, role)} = {column}" for role, column in reading.roles.items()),
        **remarks,
        "labels": "" if numbers else _about_labels(examples, data),
        "answers": "a number for each text, scored by Pearson's correlation" if numbers
        else "one label for each text, scored by accuracy",
        "lengths": about_lengths,
        "alike": "" if any(example.pair for example in examples) else near_duplicates(data).words(),
    }  # fmt: skip
    written = list(data.labels) if not numbers and len(data.labels) <= MOST_LABELS else None
    work = Workload.of(survey.sizes(data), LABEL_PASSES, LABEL_BATCH)
    return composed(
        given, data, work, rates_of(known.config, answers=False), findings, warnings,
        answers=False,
        task=name,
        base=base,
        columns=columns,
        labels=None if named_labels(known.config) else written,
        dealt=partition.clients,
        skipped=len(reading.skipped),
        max_length=longest,
        too_long=too_long,
        about_eval=" metric: spearman compares ranks alone." if numbers
        else " metric: f1_macro or matthews counts rare labels as much as frequent ones.",
    )  # fmt: skip


def are_numbers(labels: Sequence[str]) -> bool:
    """Whether labels are numbers to be predicted, and not names of classes."""
    numbers = [number(label) for label in labels]
    if any(value is None for value in numbers):
        return False
    return any(value != int(value) for value in numbers if value is not None) or len(set(numbers)) > CLASSES


def _lengths_of_texts(examples: Sequence[Example], known: KnownBase) -> tuple[int | None, str, bool]:
    """The largest length to set, what was seen in words, and whether texts have to be cut."""
    tokenizer = known.tokenizer
    assert tokenizer is not None  # where there is a configuration
    pairs = any(example.pair for example in examples)
    first = [str(example.prompt) for example in examples]
    lengths = sorted(map(len, tokenizer(first, [each.pair for each in examples] if pairs else None).input_ids))
    limits = known.context, tokenizer.model_max_length
    limit = min((value for value in limits if isinstance(value, int) and value > 0), default=lengths[-1])
    words = f"{lengths[len(lengths) // 2]} tokens (median), {lengths[-1]} at most"
    if cut := lengths[-1] > limit:
        more = sum(length > limit for length in lengths)
        words += f"; the base reads {limit}, so the ends of {more} of {len(lengths)} texts are cut"
    return min(limit, -(-lengths[-1] // STEP) * STEP), words, cut


def _about_labels(examples: Sequence[Example], data: TaskData) -> str:
    counts = Counter(example.answers[0] for example in examples)
    label, most = counts.most_common(1)[0]
    share = f"{100 * most / counts.total():.0f} % of the texts"
    return f"{len(data.labels)}: {listed(data.labels, SHOWN)}; the most frequent is {label}, {share}"


def _holds_pictures(path: Path) -> bool:
    from llm_fed.rows.pictures import SUFFIXES

    return any(file.suffix.lower() in (".npz", *SUFFIXES) for file in (path.rglob("*") if path.is_dir() else [path]))


def _seen(data: TaskData) -> tuple[Reading, dict[str, str], list[str]]:
    """How texts were read, and what is to be said of them: remarks, and warnings."""
    reading = data.reading or Reading()
    remarks = reading.for_people()
    left_out = remarks.pop("left out", None)
    warnings = [f"{what}: {count}" for what, count in survey.repeated(data).items()]
    warnings += [f"left out are {left_out}"] if left_out else []
    return reading, remarks, warnings + about_sizes(data)


def composed(
    given: UserChoices, data: TaskData, work: Workload, rates: Mapping[str, float], findings: Mapping[str, str],
    warnings: list[str], *, evaluation: Mapping[str, Json] | None = None, answers: bool = True, **values: Any,
) -> Draft:  # fmt: skip
    """The draft of these data; `values` are those of the template alone."""
    method, several = given.method or ALONE, len(data.clients) > 1
    rows = _rows(method, work)
    reason = ", as given" if given.method else f" ({WHY if several else 'there is one client'})"
    said = {what: words for what, words in findings.items() if words}
    passes = f"about {_few_digits(work.passes)} passes over the training examples of a median client"
    said["method"] = f"{method}{reason}; {work.rounds} rounds, {work.steps} steps of a client in a round: {passes}"
    scored = {key: value for key, value in (evaluation or {}).items() if value is not None}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "assets"), undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["flow"] = _flow
    text = environment.get_template("init.yaml.jinja").render(
        path=given.data, work=work, about_work=passes, rows=rows,
        about_method="Each client trains alone. docs/choosing.md says what else there is, and what was measured."
        if method == ALONE else "docs/choosing.md says when to use which method.",
        method={"name": method} | ({"num_models": min(MODELS, work.clients)} if method == "fedmerge" else {}),
        local={"steps": work.steps, "batch_size": work.batch, **rates},
        eval={"every": math.ceil(work.rounds / 4)} | scored,
        **values,
    )  # fmt: skip
    return Draft(text, said, warnings, method, tuple(rows), answers)


def completed(config: Mapping[str, Json], words: Sequence[str], base: Any, data: Any) -> dict[str, Any]:
    """A program's configuration with what `draft` would write of method, rates and template where it and its words say
    nothing. Only for a user's own texts and a base that writes texts and is at hand, as benchmarks have the settings of
    their papers. `words`: with those that stand for arguments; an argument that is an object has none. `base`, `data`:
    the arguments; None: none."""
    tree = configfile.created(config)
    said = configfile.flat(documents.plain(tree))
    said |= {key: value for key, _, value in (word.partition("=") for word in words)}
    own = said.get("task.name") == "files" if data is None or isinstance(data, str) else not has_pictures(data)
    whole = "adapter" in said and said["adapter"] in (None, "null")
    named = base is None or isinstance(base, str)
    known = None if whole or not own else _known(said.get("base.name") if named else base)
    if known is None or known.config is None or not writes(known.config):
        return tree
    learns = said.get("objective.name", said.get("objective", "sft")) == "sft"
    proposed: dict[str, Tree] = {}
    if not {"local.lr", "local.lr_end"} & {*said}:
        proposed["local"] = {**rates_of(known.config, answers=learns)}
    if "task.template" not in said:
        proposed["task"] = {"template": _template("", known)}
    if not any(key.partition(".")[0] == "method" for key in said):
        proposed["method"] = {"name": ALONE}
    return configfile.merged(proposed, tree)


def _known(base: Any) -> KnownBase | None:
    """What is known of the base of a Python program; None where it is no language model, or none is given."""
    if isinstance(base, str):
        try:
            return known_base.look_up(base)
        except UserError:  # the run says what is wrong with it
            return None
    from transformers import PreTrainedModel

    model, tokenizer = base if isinstance(base, tuple | list) and len(base) == 2 else (None, None)
    return KnownBase(tokenizer, model.config.get_text_config()) if isinstance(model, PreTrainedModel) else None


def _rows(method: str, work: Workload) -> dict[str, list[str]]:
    """What is compared, each with as many steps of a client as the method has: `local` with what shares, or another
    method with `local`."""
    if method != ALONE:
        return {ALONE: [f"method={ALONE}"], method: []}
    return {} if work.clients == 1 else {ALONE: [], **{other: [f"method={other}"] for other in RIVALS}}


def about_clients(data: TaskData, chosen: str) -> dict[str, str]:
    """Who the clients are, how that was found out, and how many examples they have."""
    sizes = survey.sizes(data)
    count = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    middle = "" if sizes[0] == sizes[-1] else f" (median {median(sizes):g})"
    validation = sum(len(client.validation) for client in data.clients.values())
    test = sum(len(client.test) for client in data.clients.values())
    names = list(data.clients)
    few = ", ".join(names) if len(names) <= SHOWN else f"{', '.join(names[:3])}, ... {names[-1]}"
    return {
        "clients": f"{len(names)}: {few}" + (f" ({chosen})" if chosen else ""),
        "examples": f"{count} per client{middle} for training; {validation} for validation and {test} for testing in "
        "total",
    }


def about_sizes(data: TaskData) -> list[str]:
    """What should be known of federations of one client, and of clients with few examples or none."""
    lines = taking_part.only_one(list(data.everybody), [id for id, own in data.clients.items() if own.train])
    if few := {name: len(client.train) for name, client in data.clients.items() if 0 < len(client.train) < FEW}:
        each = [f"{name} ({count})" for name, count in sorted(few.items(), key=lambda item: item[1])]
        have = "has" if len(few) == 1 else "have"
        lines.append(
            f"{listed(each, SHOWN)} {have} fewer than {FEW} training examples: too few to learn from alone, and to be "
            "scored on"
        )
    lacking = {
        taking_part.LEFT_OUT: [id for id in data.everybody if id not in data.clients],
        f"{taking_part.ONLY_TESTED}, or left out by methods of personal models":
            [id for id, own in data.clients.items() if not own.train],
        taking_part.UNSCORED: [id for id, own in data.clients.items() if not own.test],
    }  # fmt: skip
    return lines + [taking_part.line(what, ids, len(data.everybody)) for what, ids in lacking.items() if ids]


def _template(base: str, known: KnownBase) -> str:
    if known.tokenizer is None:
        return ITS_TEMPLATE if base == BASE else "alpaca-short"
    return "chat" if known.tokenizer.chat_template else "alpaca-short"


def _lengths(
    sample: Mapping[str, Sequence[Example]], known: KnownBase, template: str, total: int
) -> tuple[survey.LengthLimits | None, str, list[str]]:
    """Enough for the examples, `total` in all, what was seen in words, and warnings; of an unknown base nothing."""
    if known.tokenizer is None:
        return None, "", []
    context = known.context
    assert known.config is not None  # where there is a tokenizer
    by_client, note = survey.lengths(sample, known.tokenizer, template, known.config.vocab_size)
    found, whole = survey.limits(by_client, context), sorted(length for own in by_client.values() for length, _ in own)
    words = f"{whole[(len(whole) - 1) // 2]} tokens (median), {whole[-1]} at most"
    words += f", of a sample of {len(whole):,}" if len(whole) < total else ""
    words += f" (the context of the base is {context})" if context else ""
    warnings = [note] if note else []
    if found.skipped:
        most = sorted(found.skipped.items(), key=lambda item: -item[1])
        whose = listed([f"{count} of {id}" for id, count in most], SHOWN)
        warnings.append(
            f"{sum(found.skipped.values())} of {len(whole)} examples are longer than task.max_length={found.longest} "
            f"and will be skipped: {whose}; task.too_long=cut-start keeps the ends of their prompts instead"
        )
    return found, words, warnings


def _goal(examples: Sequence[Example], reading: Reading) -> tuple[str, str | None, str, str]:
    """What the answers are, the metric where it is not the task's own, and where the data say what is preferred the
    name of the loss and what it does."""
    judged = "scored by preference_accuracy, margin and ROUGE-1"
    if reading.texts:
        return f"whole texts without prompts, scored by {LIKELIHOOD} (100 / perplexity)", LIKELIHOOD, "", ""
    if "rejected" in reading.roles:
        about = "Learns which of two answers is preferred (DPO)"
        return f"pairs of a chosen and a rejected answer, {judged}", None, "dpo", about
    if "label" in reading.roles:
        return f"answers that are desirable or not, {judged}", None, "kto", "Learns which answers are desirable (KTO)"
    if any(each.options for each in examples):
        return "one of several options, scored by option_accuracy", "option_accuracy", "", ""
    if survey.are_labels(examples):
        encoder = "with an encoder as --base, such as FacebookAI/roberta-base, a head is trained for them"
        return f"a few labels, scored by exact_match; {encoder}", "exact_match", "", ""
    return "free text, scored by ROUGE-1", None, "", ""


def _few_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}".removesuffix(".0") if number >= 0.1 else f"{number:.1g}"


def _why(template: str, known: bool) -> str:
    if template == "{prompt}":
        return "texts are learned as they stand; a chat continues what is typed"
    if template == "chat":
        return "the base's own"
    if not known:
        return "use chat for an instruction-tuned base"
    return "the base has no chat template; others: alpaca, plain"


def _flow(value: Json) -> str:
    """A value in YAML on one line: {a: 1, b: text}."""
    # Of what cannot be seen YAML would make spaces, unless it is spelled out.
    plain = repr(value).isprintable() and "\\" not in repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=plain, width=math.inf)
    return text.removesuffix("\n").removesuffix("...").strip()
