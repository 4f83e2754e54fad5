"""What a report reads of a run's folder: its configuration and its lines, also where a kill has cut the last one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics import documents
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import read_file
from llm_fed.models.origin import Origin
from llm_fed.runs.records import read_object as read_checked
from llm_fed.runs.records import read_records
from llm_fed.settings.config import EvalConfig
from llm_fed.settings.paths import hub_place, public

Line = dict[str, Any]
_NAME = "config.yaml"
# What runs share whose clients have the same test, beside seeds; and with eval what those share that train alike.
_SAME_DATA, _TESTED = ("seed", "base", "task"), ("metric", "limit", "max_new_tokens")
_DECISIVE = ("rounds", "adapter", "local")


def read_config(path: Path) -> tuple[Line, str]:
    """What the head of the report says, and the resolved configuration, where paths are cut to their last names.
    UserError where it is not there, or not the configuration of a run."""
    recorded = read_object(path.parent / "environment.json").get("base")
    try:
        text = read_file(path).decode()
        own: Any = documents.load(text)
        config = public(own)
        names = {section: str(config[section]["name"]) for section in ("method", "task")}
        names["data"] = data_in_words(config["task"])
        base = base_of(own["base"], recorded)
        names |= {"base": base.describe, "base_name": base.name}
        during = config.get("eval", {}).get("during", EvalConfig.during)
        clip = (config.get("privacy") or {}).get("clip")
        facts = names | {key: config[key] for key in ("seed", "rounds")} | {"during": during, "clip": clip}
        return facts, documents.dump(config)
    except OSError as error:
        problem = f"config.yaml cannot be read ({error.strerror})"
        raise UserError(f"{path.parent} is not the folder of a run: {problem}.") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, UserError) as error:
        raise UserError(f"{path} is not the configuration that `llm-fed run` saved with the run.") from error


def data_in_words(task: Mapping[str, Any]) -> str:
    """The task by name, or the name of the files that it reads, of a section without paths of this machine."""
    path = task.get("path")
    return str(path).removeprefix("hf://") if task["name"] == "files" and path else str(task["name"])


def base_of(settings: Mapping[str, Any], recorded: object) -> Origin:
    """The base of a run with its revision, dtype and quantisation, without paths: of its settings, and of what
    environment.json has `recorded`, where earlier versions wrote nothing."""
    if isinstance(recorded, dict):
        return Origin.from_json(recorded).public()
    place = hub_place(settings["name"])
    name, revision = place or (settings["name"], settings.get("revision"))
    return Origin(name, revision, None, settings.get("quantization"), settings.get("dtype")).public()


def was_cut(path: Path) -> bool:
    """Whether a kill has cut the last line of a JSONL file."""
    return path.exists() and bool(read_file(path).rpartition(b"\n")[2])


def read_object(path: Path) -> Line:
    """The object of a JSON file; empty if it is missing. UserError where it is not JSON."""
    try:
        return read_checked(path) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def usage(run_dir: Path) -> tuple[str, str] | None:
    """The first client that has an exported model, and a few lines of Python that use it, from that model's card."""
    for card in filter(Path.is_file, sorted(run_dir.glob("adapters/[!.]*/README.md"))):
        text = card.read_text(encoding="utf-8", errors="replace")
        _, opening, rest = text.partition("```python\n")
        if opening:
            code = rest.partition("\n```")[0]
            folder = f"{run_dir.name}/adapters/{card.parent.name}"
            return card.parent.name, code.replace('"path/to/this/folder"', repr(folder))
    return None


def reference(run_dir: Path) -> Mapping[str, float]:
    """By split, the mean scores of a run of `local` on the same data (`local_beside`), those of the round that was
    tested; empty where none is known."""
    if (folder := local_beside(run_dir)) is None:
        return {}
    try:
        summary, lines = read_object(folder / "summary.json"), read_records(folder / "metrics.jsonl")
        tested = [x for x in lines if x["kind"] == "score" and x["round"] == summary["round"]]
        return {x["split"]: x["mean"] for x in reversed(tested)}
    except (OSError, KeyError, UserError):
        return {}  # it is another's folder, which is no reason to have no report


def local_beside(run_dir: Path, *, alike: bool = True) -> Path | None:
    """The folder of a finished run of `local` on the same data with the same settings; None where none is known. It is
    looked for among the runs that this one needs, and beside it, where `compare` and `quickstart` put it.

    Args:
        alike: whether it must have trained with the same settings. Otherwise one that has is preferred, and another one
            must have the same base, data, seeds and test.
    """
    own: list[Any] = []
    second: Path | None = None
    files = [run_dir / _NAME, *sorted([*run_dir.glob(f"needs/*/{_NAME}"), *run_dir.parent.glob(f"*/{_NAME}")])]
    for file in files:
        folder = file.parent
        try:
            config = documents.load(read_file(file).decode())
            evaluation = {**config["eval"], "base": None, "cross": None}
            seeds = config.get("seeds")  # earlier versions had none
            tested = [seeds, *(evaluation.get(key) for key in _TESTED), *(config[key] for key in _SAME_DATA)]
            decisive = [tested, evaluation, *(config[key] for key in _DECISIVE)]
            own = own or decisive
            known = folder != run_dir and (folder / "summary.json").exists()
            if known and config["method"]["name"] == "local" and tested == own[0] and (decisive == own or not alike):
                read_object(folder / "summary.json")
                if decisive == own:
                    return folder
                second = second or folder
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, UserError):
            if not own:
                return None  # else it is another's folder
    return second
