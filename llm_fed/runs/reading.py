"""What a run folder says of a run, finished or not, without opening it for writing."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_fed.basics import checksum, documents
from llm_fed.basics.errors import UserError, require
from llm_fed.basics.files import read_file
from llm_fed.runs.records import comparable, read_records, recall
from llm_fed.settings import paths, plugins
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, from_dict

FORMAT = 1  # of a run folder, in its config.yaml; what reads another one says so and reads nothing else

VOID = (
    ". Its epsilon is void: noise and batches were drawn from the seed, which its cards print, so take back what was "
    "handed on of it"
)
REOPENED = "reopened.json"  # a finished run goes on: its results are those of its earlier end
HERE = "."  # where the adapters of a merge's output lie, beside its summary


def read_config(folder: Path) -> Config:
    """The configuration that a run folder holds. NotAllowed: it names code from outside, see `plugins.check_folder`.
    UserError: the folder is none, or its file is damaged."""
    saved = saved_config(folder)
    plugins.check_folder(folder / "config.yaml", saved)
    return from_dict(saved)


def saved_config(folder: Path) -> dict[str, Any]:
    """The configuration that a run folder holds, as nested values with absolute paths. What it names is not looked up;
    who does that begins with `read_config`. UserError: its file is missing or damaged, or of another format."""
    path = folder / "config.yaml"
    if not path.is_file():
        held = "holds a comparison" if (folder / "table.json").is_file() else "has no config.yaml"
        whole = ", without @ROUND" if "@" in folder.name else ""
        raise UserError(f"{folder} is not a run folder: it {held}; give the --out of an llm-fed run{whole}")
    try:
        tree = dict(documents.load(checksum.uncommented(read_file(path).decode())))
        held, private = tree.pop("format", None), (tree.get("privacy") or {}).get("clip") is not None
        saved = as_dict(paths.absolute(from_dict(tree))) if held == FORMAT else {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, UserError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is damaged: {reason}; llm-fed run --fresh starts again") from error
    if held != FORMAT:
        raise UserError(
            f"{folder} is a run folder of format {'0 (llm_fed 0.4 or older)' if held is None else held}, and this "
            f"version reads format {FORMAT}; use the version that made it, or train it again{VOID if private else ''}"
        )
    return saved


def scores_in_training(lines: Sequence[dict[str, Any]], split: str) -> dict[int, dict[str, Any]]:
    """The score of each round that was made during training, of the lines of a metrics.jsonl that are comparable.

    A run that is tested during training is tested once more at its end: the first score of a round counts. Round 0 is
    the base alone. A score has no `mean` where no client has examples of the split.
    """
    scores: dict[int, dict[str, Any]] = {}
    for line in comparable(lines):
        if line["kind"] == "score" and line["split"] == split:
            scores.setdefault(line["round"], line)
    return dict(sorted(scores.items()))  # the base alone may be scored last


def validated(folder: Path, split: str, round: int) -> dict[str, Any] | None:
    """The score line on this split of the models that a run has tested: of what was done after the last round, else of
    the tested round; None where they were not scored on it."""
    lines = read_records(folder / "metrics.jsonl")
    after = [line for line in comparable(lines) if line["kind"] == "after" and line["split"] == split]
    line = after[-1] if after else scores_in_training(lines, split).get(round, {})
    return line if "mean" in line else None


def events(folder: Path) -> Counter[str]:
    """What went wrong in a run, such as uploads that were refused, and how often."""
    lines = (line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "event")
    return Counter(line["event"] for line in lines if not line.get("information"))


def finished(folder: Path) -> dict[str, Any]:
    """What summary.json says of a finished run. UserError: the folder is none, or the file is damaged."""
    read_config(folder)
    if (done := saved_summary(folder)) is None:
        raise UserError(
            f"{folder} is not finished, so it has no personal adapters yet; continue it with llm-fed run first, or "
            f"name a round that it has kept: {folder}@ROUND"
        )
    return done


def is_finished(folder: Path) -> bool:
    """Whether a run is at its end; one that goes on keeps its earlier results until then."""
    return (folder / "summary.json").exists() and not (folder / REOPENED).exists()


def saved_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json; None where the run is not finished."""
    return recall(folder / "summary.json", UserError)


def shares_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """By client which part of its rows is tested, as far as summary.json has `examples`."""
    counts = summary.get("examples", {}).items()
    return {client: own["test"] / sum(own.values()) for client, own in counts if own.get("test")}


def adapter_folders(folder: Path) -> dict[str, Path]:
    """The exported adapter of each client of a finished run that has one."""
    if finished(folder).get("adapters") == HERE:
        return {path.name: path for path in sorted(folder.iterdir()) if (path / "README.md").is_file()}
    partial = re.compile(r"\..*\.(partial|replaced)")  # what a killed export may have left
    return {path.name: path for path in sorted(folder.glob("adapters/*")) if not partial.fullmatch(path.name)}


def exported(folder: Path, clients: Sequence[str] = ()) -> dict[str, Path]:
    """The exported adapters of these clients of a finished run, or of all that it has exported. UserError: it has none,
    or not of a client that is named; what to do about it."""
    folders = adapter_folders(folder)
    everybody = dict.fromkeys([*folders, *finished(folder)["scores"].get("clients", ())])
    clients = [require("--client", client, everybody) for client in clients]
    missing = [client for client in clients if client not in folders]
    if folders and not missing:
        return {client: folders[client] for client in clients or folders}
    if (folder / "network.json").is_file():
        raise UserError(f"{folder} is a run over a network, so its personal adapters are on the clients' machines")
    whose = f"{', '.join(missing[:5])}{', ...' if missing[5:] else ''}" if missing else "anybody"
    if (requested := read_config(folder).export.clients) == "all":
        raise UserError(f"{folder} has no personal adapter of {whose} any more; llm-fed run --fresh makes them again")
    again = shlex.join(["llm-fed", "run", f"{folder}/config.yaml", "export.clients=all", "--out", str(folder)])
    raise UserError(
        f"{folder} has no personal adapter of {whose}, since export.clients is "
        f"{requested if isinstance(requested, str) else list(requested)}; this exports all, without training: {again}"
    )
