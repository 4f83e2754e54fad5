"""The report of a run: one self-contained HTML file made from the run's folder alone."""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llm_fed.config import EvalConfig
from llm_fed.errors import RunError, UserError
from llm_fed.eval import atlas, merges, plots
from llm_fed.files import write_file
from llm_fed.paths import public
from llm_fed.runs.folder import comparable

Line = dict[str, Any]
KINDS = ("client", "round", "score", "event", "drop-out", "server", "merge", "privacy")


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into the run's folder and returns its path; it says if the run is unfinished.

    Reads config.yaml, metrics.jsonl, timing.jsonl; the last two may be missing or end in a half-written line.
    UserError: `run_dir` is no run's folder, or a file in it is damaged.
    RunError: the disk is full, or the folder cannot be written.
    """
    run_dir = Path(run_dir).resolve()
    facts, config_text = _read_config(run_dir / "config.yaml")
    lines, cut = _read_lines(run_dir / "metrics.jsonl")
    timing, _ = _read_lines(run_dir / "timing.jsonl")
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in KINDS}
    since = comparable(lines)
    curve, final = _scores([line for line in since if line["kind"] == "score"], facts.pop("during"))
    shown = final or (curve[-1] if curve else None)
    if shown:
        shown = {"loss": None, "losses": {}} | shown  # earlier versions scored without them
    untrained = [line for line in by_kind["score"] if shown and (line["round"], line["split"]) == (0, shown["split"])]
    name = run_dir.name
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": _size, "number": _number, "duration": _duration}
    path = run_dir / "report.html"
    try:
        html = environment.get_template("report.html.jinja").render(
            run=name,
            **facts,
            config_text=config_text,
            command=shlex.join(["llm-fed", "run", f"{name}/config.yaml", "--out", f"{name}-again"]),
            cut=cut,
            anew=next((line for line in since if line["kind"] == "search anew"), None),
            done=max((line["round"] for line in by_kind["round"]), default=0),
            shown=shown,
            alone=untrained[0] if untrained and untrained[0] is not shown else None,
            final=bool(final),
            clients=_client_rows(by_kind, shown),
            totals=_totals(by_kind["round"]),
            privacy=by_kind["privacy"][-1] if by_kind["privacy"] else None,
            seconds=sum(line["seconds"] for line in timing),
            parts=_parts(timing),
            events=_events(by_kind["event"]),
            parents=by_kind["merge"][0]["rounds"] if by_kind["merge"] else {},
            merges=merges.tabulate(_recipes(by_kind)) if by_kind["merge"] else [],
            pictures=_pictures(by_kind, curve, final),
        )
        write_file(path, html.encode())
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _read_config(path: Path) -> tuple[Line, str]:
    """What the head of the report says, and the resolved configuration, where paths are cut to their last names."""
    try:
        text = path.read_text(encoding="utf-8")
        config: Any = public(OmegaConf.to_container(OmegaConf.create(text)))
        names = {section: config[section]["name"] for section in ("method", "base", "task")}
        during = config.get("eval", {}).get("during", EvalConfig.during)
        facts = names | {key: config[key] for key in ("seed", "rounds")} | {"during": during}
        return facts, yaml.safe_dump(config, sort_keys=False)
    except OSError as error:
        problem = f"config.yaml cannot be read ({error.strerror})"
        raise UserError(f"{path.parent} is not the folder of a run: {problem}.") from error
    except (YAMLError, OmegaConfBaseException, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not the configuration that `llm-fed run` saved with the run.") from error


def _read_lines(path: Path) -> tuple[list[Line], bool]:
    """The objects of a JSONL file (none if it is missing), and whether its last line was cut by a kill."""
    if not path.exists():
        return [], False
    # a kill can also cut a character in two
    *whole, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, text in enumerate(whole, start=1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON ({error}). Continue the run to repair it.") from error
    return lines, bool(last)


def _scores(lines: list[Line], during: str) -> tuple[list[Line], Line | None]:
    """The scores of the split that is scored `during` training, one per round, and the final test score."""
    curve: dict[int, Line] = {}
    final = None
    for line in lines:
        # the final score of a run that is tested during training is the second one of its round
        if line["split"] == during and line["round"] not in curve:
            curve[line["round"]] = line
        elif line["split"] == "test" and line["round"]:  # round 0 is the base alone
            final = line
    return list(curve.values()), final


def _client_rows(by_kind: dict[str, list[Line]], shown: Line | None) -> list[Line]:
    """One row per client of the table: score and loss on the split that is shown, last training loss, rounds, bytes,
    numbers of drop-outs and of events."""
    work: dict[str, list[Line]] = {client: [] for client in (shown["clients"] if shown else ())}
    for line in by_kind["client"]:
        work.setdefault(line["client"], []).append(line)
    trouble = Counter(line.get("client") for line in by_kind["event"])
    silent = Counter(line["client"] for line in by_kind["drop-out"])
    return [
        {
            "client": client,
            "score": shown["clients"].get(client) if shown else None,
            "scored_loss": shown.get("losses", {}).get(client) if shown else None,
            "loss": next((line["loss"] for line in reversed(lines) if line.get("loss") is not None), None),
            "examples": lines[-1]["examples"] if lines else None,
            "rounds": len(lines),
            "bytes_up": sum(line["bytes_up"] for line in lines),
            "bytes_down": sum(line["bytes_down"] for line in lines),
            "drop_outs": silent[client],
            "events": trouble[client],
        }
        for client, lines in work.items()
    ]


def _totals(rounds: list[Line]) -> Line:
    """Sums over the rounds, and the mean share of padding."""
    names = ("asked", "arrived", "refused", "failed", "dropped_out", "bytes_up", "bytes_down")
    sums: Line = {name: sum(line.get(name, 0) for line in rounds) for name in names}
    return sums | {"padding": fmean(line["padding"] for line in rounds) if rounds else None}


def _parts(timing: list[Line]) -> list[tuple[str, float]]:
    """(part of a round, seconds over all rounds), the longest first."""
    seconds: dict[str, float] = {}
    for line in timing:
        for part, value in line["parts"].items():
            seconds[part] = seconds.get(part, 0.0) + value
    return sorted(seconds.items(), key=lambda item: -item[1])


def _events(events: list[Line]) -> list[Line]:
    """Equal events of a client as one row with its rounds, in order of first appearance."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for line in events:
        key = (line["event"], line.get("client", ""), line.get("reason", ""))
        rounds.setdefault(key, []).append(line["round"])
    return [
        {"event": event, "client": client, "reason": reason, "rounds": _few(numbers)}
        for (event, client, reason), numbers in rounds.items()
    ]


def _few(numbers: list[int]) -> str:
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{len(numbers)} times, from {min(numbers)} to {max(numbers)}"


def _recipes(by_kind: dict[str, list[Line]]) -> dict[str, Line]:
    return {line["client"]: line for line in by_kind["merge"]}


def _pictures(by_kind: dict[str, list[Line]], curve: list[Line], final: Line | None) -> list[Line]:
    """Title, alternative text and the data URIs (light and dark) of each picture for which there is data."""
    draws: list[tuple[str, str, Callable[..., Path]]] = []  # title, alternative text, function
    rounds, shown = by_kind["round"], final or (curve[-1] if curve else None)
    if curve:
        draw = partial(
            plots.plot_scores,
            rounds=[line["round"] for line in curve],
            mean=[line["mean"] for line in curve],
            worst_half=[line["worst_half"] for line in curve],
            metric=curve[-1]["metric"],
            split=curve[-1]["split"],
            test=(final["round"], final["mean"]) if final else None,
        )
        alt = f"{curve[-1]['split']} score: mean and worst half of the clients"
        draws.append(("Score by round", alt, draw))
    if rounds:
        numbers = [line["round"] for line in rounds]
        losses: dict[str, tuple[list[int], list[float]]] = {}
        for line in by_kind["client"]:
            client_rounds, client_losses = losses.setdefault(line["client"], ([], []))
            client_rounds.append(line["round"])
            client_losses.append(_value(line))
        mean = (numbers, [_value(line) for line in rounds])
        known = [line for line in curve if line.get("loss") is not None]
        scored = ([line["round"] for line in known], [line["loss"] for line in known]) if known else None
        split = curve[-1]["split"] if curve else ""
        draw = partial(plots.plot_losses, clients=losses, mean=mean, scored=scored, split=split)
        title, alt = "Training loss by round", "training loss of each client and their mean"
        if scored:
            title, alt = f"Training and {split} loss by round", f"{alt}, and the mean {split} loss"
        draws.append((title, alt, draw))
        up, down = ([line[name] for line in rounds] for name in ("bytes_up", "bytes_down"))
        draw = partial(plots.plot_bytes, rounds=numbers, up=up, down=down)
        draws.append(("Bytes by round", "bytes sent up and down in each round", draw))
    weights = merges.weights_after(by_kind["server"], shown["round"] if shown else None)
    if weights:
        groups = plots.clusters(weights["clients"])
        draw = partial(plots.plot_weights, clients=weights["clients"], values=weights["values"], groups=groups)
        alt = "heat map of merging weights: a row per client, a column per soup model"
        title = f"Merging weights of round {shown['round']}" if shown else "Merging weights"
        draws.append((title, alt, draw))
    if found := atlas.spreads(by_kind["server"]):
        alt = "median, quartiles and range of the merging coefficients by round, and the share of negative ones"
        draws.append(("Merging coefficients by round", alt, partial(atlas.draw, found)))
    curves, chosen = merges.curves(_recipes(by_kind))
    if curves:
        draw = partial(plots.plot_mixing, curves=curves, chosen=chosen, metric=shown["metric"] if shown else "score")
        draws.append(
            ("Score by merging weight", "validation score of each client by the federated adapter's weight", draw)
        )
    return [
        {"title": title, "alt": alt, "light": _embed(draw, False), "dark": _embed(draw, True)}
        for title, alt, draw in draws
    ]


def _embed(draw: Callable[..., Path], dark: bool) -> str:
    with TemporaryDirectory() as folder:
        picture = draw(Path(folder) / "picture.png", dark=dark).read_bytes()
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def _value(line: Line) -> float:
    """A line's loss; NaN leaves a gap in a curve where nobody trained."""
    loss = line.get("loss")
    return math.nan if loss is None else loss


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _size(count: float) -> str:
    """Bytes with a decimal unit, three digits: 1.23 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.1f} s" if minutes < 1 else f"{minutes:.1f} min" if hours < 1 else f"{hours:.1f} h"
