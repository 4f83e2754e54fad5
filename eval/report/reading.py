"""What a report reads of a run's folder: its configuration and its lines, also where a kill has cut the last one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fed.basics import documents
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import read_file
from llm_fed.models.origin import Origin
from llm_fed.runs.reading import is_finished, saved_config
from llm_fed.runs.records import read_records, recall
from llm_fed.settings.paths import public

Line = dict[str, Any]

_MAY_BE_LOCAL = re.compile(rb"""\bname["']?: *["']?local\b""")


def read_config(run_dir: Path) -> tuple[Line, str]:
    """What the head of the report says, and the resolved configuration, where paths are cut to their last names.
    UserError where it is not there, or not the configuration of a run."""
    saved = saved_config(run_dir)
    recorded = read_object(run_dir / "environment.json").get("base")
    config, base = public(saved), (Origin.from_json(recorded) if recorded else Origin(saved["base"]["name"])).public()
    task = config["task"]
    data = str(task["path"]).removeprefix("hf://") if task["name"] == "files" and task["path"] else task["name"]
    facts = {"method": config["method"]["name"], "task": task["name"], "data": data, "base": base.describe}
    facts |= {"base_name": base.name, "during": config["eval"]["during"], "clip": config["privacy"]["clip"]}
    return facts | {key: config[key] for key in ("seed", "rounds")}, documents.dump(config)


def was_cut(path: Path) -> bool:
    """Whether a kill has cut the last line of a JSONL file."""
    return path.exists() and bool(read_file(path).rpartition(b"\n")[2])


def read_object(path: Path) -> Line:
    """The object of a JSON file; empty if it is missing. UserError where it is not JSON."""
    return recall(path, UserError) or {}


def usage(run_dir: Path) -> tuple[str, str] | None:
    """The first client that has an exported model, and a few lines of Python that use it, from that model's card."""
    for card in filter(Path.is_file, sorted(run_dir.glob("adapters/[!.]*/README.md"))):
        _, opening, rest = card.read_text(encoding="utf-8", errors="replace").partition("```python\n")
        if opening:
            folder = f"{run_dir.name}/adapters/{card.parent.name}"
            return card.parent.name, rest.partition("\n```")[0].replace('"path/to/this/folder"', repr(folder))
    return None


def reference(run_dir: Path) -> Mapping[str, float]:
    """By split, the mean scores of a run of `local` on the same data (`local_beside`), those of the round that was
    tested; empty where none is known."""
    try:
        if (folder := local_beside(run_dir)) is None:
            return {}
        tested = read_object(folder / "summary.json")["round"]
        scored = [x for x in read_records(folder / "metrics.jsonl") if x["kind"] == "score" and x["round"] == tested]
        return {x["split"]: x["mean"] for x in reversed(scored)}
    except (OSError, KeyError, UserError):
        return {}  # it is another's folder, which is no reason to have no report


def local_beside(run_dir: Path, *, alike: bool = True) -> Path | None:
    """The folder of a finished run of `local` on the same data with the same settings; None where none is known. It is
    looked for among the runs that this one needs, and beside it, where `compare` and `quickstart` put it. `alike`:
    whether it must have trained with the same settings. Otherwise one that has is preferred, and another one must have
    the same base, data, seeds and test."""
    own, second = _decisive(saved_config(run_dir)), None
    for file in sorted([*run_dir.glob("needs/*/config.yaml"), *run_dir.parent.glob("*/config.yaml")]):
        try:
            if file.parent == run_dir or not _MAY_BE_LOCAL.search(read_file(file)):
                continue  # there may be a hundred, and to read one as YAML takes milliseconds
            config = saved_config(file.parent)
            if config["method"]["name"] != "local" or not is_finished(file.parent):
                continue
        except (UserError, OSError):
            continue  # another's folder, or damaged
        tested, trained = _decisive(config)
        if (tested, trained) == own:
            return file.parent
        if tested == own[0] and not alike:
            second = second or file.parent
    return second


def _decisive(config: Line) -> tuple[list[Any], list[Any]]:
    """What runs share whose clients have the same test; and what those share as well that train alike."""
    evaluation = {**config["eval"], "base": None, "cross": None}
    tested = [evaluation[key] for key in ("metric", "limit", "max_new_tokens")]
    tested += [config[key] for key in ("seed", "seeds", "base", "task")]
    return tested, [evaluation, *(config[key] for key in ("rounds", "adapter", "local"))]
