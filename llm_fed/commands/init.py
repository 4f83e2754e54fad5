"""From a folder of a user's data to a configuration that runs: what was seen in the data, and what follows from it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llm_fed import datapath, tasks
from llm_fed.commands import survey
from llm_fed.commands.duplicates import near_duplicates
from llm_fed.config import ColumnsConfig, PartitionConfig, TaskConfig
from llm_fed.errors import RunError, UserError
from llm_fed.eval.scores import LIKELIHOOD
from llm_fed.experiment import taking_part
from llm_fed.files import write_file
from llm_fed.models import speed
from llm_fed.tasks import columns as usual_columns
from llm_fed.tasks.columns import REQUIRED
from llm_fed.tasks.common import TaskData, text_of
from llm_fed.tasks.examples import SAMPLE
from llm_fed.tasks.files import plan_of
from llm_fed.tasks.reading import Reading
from llm_fed.tasks.rows import FileRows, Row

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

BASE = "Qwen/Qwen3-0.6B"
EPOCHS, STEPS, BATCH = 5, 20, 4
MODELS = 4  # of FedMerge's soup, as far as there are clients
KNOWN_LAYERS = ("q_proj", "v_proj")  # what adapters go on, of the model types that have layers of these names
WITH_THEM = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "olmo2", "smollm3")
SMALL = 1024  # the hidden size below which a model learns with larger steps
FAST, SLOW = {"lr": 1e-3, "lr_end": 1e-4}, {"lr": 2e-4, "lr_end": 2e-5}

Ask = Callable[[str, str], str]  # a question and its usual answer -> the answer


@dataclass(frozen=True)
class Given:
    """What the user said beforehand."""

    data: str
    base: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # role -> column
    clients: int | None = None  # that the rows are dealt out to, where no column says whose they are
    method: str | None = None


@dataclass(frozen=True)
class Draft:
    """A configuration as text, and what was seen."""

    text: str
    findings: dict[str, str]  # what -> words
    warnings: list[str]


def draft(given: Given, ask: Ask | None) -> Draft:
    """A configuration for the data, with a comment for every choice.

    Args:
        ask: how to ask the user; None: nobody is there, so that what is not given must follow from the data.

    Raises:
        UserError: the data cannot be read, or it does not say what is what and nobody can be asked.
    """
    path = datapath.local("DATA", given.data)
    columns, partition = _columns(path, given, ask)
    base = given.base or (ask("Base model, a Hub id or a folder", BASE) if ask else BASE)
    config = TaskConfig("files", str(path), columns=ColumnsConfig(**columns), bad_rows="skip", partition=partition)
    data = tasks.load(config, 0)
    chosen, reading = survey.sample(data), data.reading or Reading()
    tokenizer, model, problem = _of_base(base)
    remarks = reading.for_people()
    warnings = [f"{count} {what}" for what, count in survey.repeated(data).items()]
    if left_out := remarks.pop("left out", None):
        warnings.append(f"left out are {left_out}")
    smallest, middle, largest = survey.sizes(data.clients.values())
    if smallest < 10:
        warnings.append(
            f"the smallest client has {smallest} training examples, which is too few to train and to evaluate on"
        )
    for what, names in survey.missing(data).items():
        warnings.append(taking_part.line(what, names, len(data.everybody)))
    if problem:
        warnings.append(f"lengths and template are unknown, because {base} cannot be loaded here: {problem}")
    template = "chat" if tokenizer is not None and tokenizer.chat_template else "alpaca-short"
    template = "{prompt}" if reading.texts else template
    rows = getattr(model, "vocab_size", None)
    measured = survey.lengths(chosen, tokenizer, template, rows) if tokenizer is not None else None
    if measured and measured.note:
        warnings.append(measured.note)
    findings = {
        "clients": f"{len(data.clients)}: {_few(list(data.clients))}",
        "examples": f"{_range(smallest, middle, largest)} for training; {_held_out(data)}",
        "columns": ", ".join(f"{role} = {name}" for role, name in reading.roles.items()),
        **remarks,
        "writing": ", ".join(
            f"{name} {100 * share:.0f} %"
            for name, share in survey.scripts(f"{text_of(e.prompt)} {e.answers[0]}" for e in chosen)
        ),
    }
    if almost := near_duplicates(data).words():
        findings["alike"] = almost
    context = getattr(model, "max_position_embeddings", None)
    limits: dict[str, int] = {}
    if measured:
        limits = {"max_length": min(measured.enough, context or measured.enough), "answer": measured.enough_answer}
        longer = sum(length > limits["max_length"] for length in measured.whole)
        findings["lengths"] = (
            f"{survey.quantile(measured.whole, 0.5)} tokens (median), {measured.whole[-1]} at most"
            + (f" (the context of the base is {context})" if context else "")
        )
        if longer:
            warnings.append(
                f"{longer} of {len(measured.whole)} examples are longer than task.max_length={limits['max_length']} "
                "and will be skipped"
            )
    metric = None
    if reading.texts:
        metric = LIKELIHOOD
    elif any(each.options for each in chosen):
        metric = "option_accuracy"
    elif survey.are_labels(chosen):
        metric = "exact_match"
    findings["answers"] = (
        f"whole texts without prompts, scored by {LIKELIHOOD} (100 / perplexity)" if metric == LIKELIHOOD
        else "one of several options, scored by option_accuracy" if metric == "option_accuracy"
        else "a few labels, scored by exact_match" if metric
        else "free text, scored by ROUGE-1"
    )  # fmt: skip
    if not torch.cuda.is_available() and (hint := speed.hint()):
        findings["speed"] = hint
    small = model is not None and getattr(model, "hidden_size", SMALL) < SMALL
    method = given.method or ("fedmerge" if len(data.clients) > 1 else "local")
    rounds = min(50, max(10, round(EPOCHS * middle / (STEPS * BATCH))))
    evaluation = {
        "every": math.ceil(rounds / 4),
        "metric": metric,
        "max_new_tokens": None if reading.texts else limits.get("answer"),
    }
    text = _rendered(
        rounds=rounds,
        passes=round(rounds * STEPS * BATCH / middle),
        base=base,
        known=model is None or model.model_type in WITH_THEM,
        path=given.data,
        columns=columns,
        dealt=partition.clients,
        skipped=len(reading.skipped),
        template=template,
        why=_why(template, model is not None),
        max_length=limits.get("max_length"),
        method={"name": method} | ({"num_models": min(MODELS, len(data.clients))} if method == "fedmerge" else {}),
        local={"steps": STEPS, "batch_size": BATCH} | (SLOW if not small else FAST),
        eval={key: value for key, value in evaluation.items() if value is not None},
    )
    return Draft(text, findings, warnings)


def write(path: Path, text: str, *, force: bool) -> None:
    """Put the configuration where it was asked for.

    Raises:
        UserError: something is there already.
        RunError: it cannot be written.
    """
    if path.exists() and not force:
        raise UserError(f"{path} already exists; give another --out, or --force to overwrite it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _columns(path: Path, given: Given, ask: Ask | None) -> tuple[dict[str, str], PartitionConfig]:
    """The columns that the configuration has to name (the usual names need not be), and how rows become clients."""
    found = dict(given.columns)
    root, layout = plan_of(path, ColumnsConfig(client=found.get("client")))
    file, sample = _first_rows([root / name for part in layout.parts if part.split == "train" for name in part.files])
    if file is None:
        return found, PartitionConfig()  # loading it says what is wrong
    names = list(dict.fromkeys(name for values in sample for name in values))
    pairs = usual_columns.form_of(found, names, sample) == "pairs"
    for role in [role for role in REQUIRED if pairs and role not in found]:
        if usual_columns.usual(role, names, found.values()):
            continue
        guess = survey.likely(role, names) or next((name for name in names if name not in found.values()), "")
        if ask:
            found[role] = ask(f"Which column is the {role}? ({', '.join(names)})", guess)
        elif survey.likely(role, names):
            found[role] = guess
        else:
            options = " and ".join(f"--{each} COLUMN" for each in REQUIRED)
            raise UserError(f"{file}: none of the columns {', '.join(names)} looks like the {role}; give {options}")
    if given.clients is not None and "client" in found:
        raise UserError("--client names the column of the clients, and --clients splits the rows at random; give one")
    of_all = all(part.client is None for part in layout.parts)
    if not of_all and given.clients is not None:
        raise UserError(f"--clients splits the rows at random, but the names of the files in {path} say whose they are")
    if not of_all or "client" in found or (given.clients is None and usual_columns.usual("client", names, ())):
        return found, PartitionConfig()
    if given.clients is None and (likely := survey.likely("client", names)):
        found["client"] = likely
        return found, PartitionConfig()
    count: int | str | None = given.clients
    if count is None and ask:
        answer = ask(
            f"Which column names the client ({', '.join(names)}), or among how many clients shall the rows be split?",
            "10",
        )
        if answer in names:
            found["client"] = answer
            return found, PartitionConfig()
        count = answer
    if not str(count or "").isdigit():
        raise UserError(f"{file}: no column names the clients; give --client COLUMN, or --clients N to split the "
                        "rows at random among N clients")  # fmt: skip
    return found, PartitionConfig("iid", clients=int(str(count)))


def _first_rows(files: Sequence[Path]) -> tuple[Path | None, list[dict[str, Any]]]:
    """The first file that has a row that can be read, and some rows of it."""
    for file in files:
        rows = [row.values for row in islice(FileRows(file), SAMPLE) if isinstance(row, Row)]
        if rows:
            return file, rows
    return None, []


def _of_base(name: str) -> tuple[PreTrainedTokenizerBase | None, PretrainedConfig | None, str]:
    """The base's tokenizer and configuration, or why they cannot be had."""
    from transformers import AutoConfig, AutoTokenizer  # seconds

    from llm_fed.models import forms
    from llm_fed.models.loading import check_name, explain

    folder_or_id = check_name(name)
    try:
        config = AutoConfig.from_pretrained(folder_or_id, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder_or_id, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers share no class of errors
        if os.path.isdir(folder_or_id):
            raise UserError(explain(name, error, "a causal LM")) from error
        return None, None, " ".join(str(error).split())[:200]
    forms.check_quantization(name, config)
    return tokenizer, config.get_text_config(), ""


def _why(template: str, known: bool) -> str:
    if template == "{prompt}":
        return "texts are learned as they stand; a chat continues what is typed"
    if not known:
        return "use chat for an instruction-tuned base"
    return "the base's own" if template == "chat" else "the base has no chat template; others: alpaca, plain"


def _rendered(**values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "assets"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["flow"] = _flow
    return environment.get_template("init.yaml.jinja").render(**values)


def _flow(value: Any) -> str:
    """A value in YAML on one line: {a: 1, b: text}."""
    # Of what cannot be seen YAML would make spaces, unless it is spelled out.
    plain = repr(value).isprintable() and "\\" not in repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=plain, width=math.inf)
    return text.removesuffix("\n").removesuffix("...").strip()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, ... {names[-1]}"


def _range(smallest: int, middle: float, largest: int) -> str:
    if smallest == largest:
        return f"{smallest} per client"
    return f"{smallest} to {largest} per client (median {middle:g})"


def _held_out(data: TaskData) -> str:
    test = sum(len(client.test) for client in data.clients.values())
    validation = sum(len(client.validation) for client in data.clients.values())
    return f"{validation} for validation and {test} for testing in total"
