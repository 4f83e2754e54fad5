"""Where a run computes: what decides the bits of a result beside the configuration, and what the report says of it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.bench.build import Experiment
from llm_fed.engine.ways import ways
from llm_fed.runs.folder import Run
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import processes

LIBRARIES = ("llm_fed", "transformers", "peft")


def same_environment(run: Run, experiment: Experiment, reporter: Reporter) -> None:
    """Record it in environment.json; a continued run takes over what it can, and says what has changed.

    The environment with which it is continued is recorded as well, as an item of `continued`. Beside each lies which
    base it is, as far as that can be known; a run that moves finds its base elsewhere, so this is not compared here.
    UserError: the labels are not those of the run, so that the outputs of its heads would mean something else.
    """
    engine, config = experiment.engine, experiment.config
    now = environment(
        experiment.base.device, config.base.dtype, experiment.runtime.clients_per_pass, config.engine.fast,
        tried=not engine.untried,
    )  # fmt: skip
    now["base"] = experiment.base.source.as_json()
    labels = {"labels": list(experiment.base.labels)} if experiment.base.labels else {}
    if (recorded := run.recall("environment.json") if run.continues else None) is None:
        if config.privacy.draws:
            now["secret"] = run.secret.mark
        run.remember("environment.json", now | labels)
        return
    if (begun := recorded.get("labels", labels.get("labels"))) != labels.get("labels"):
        raise UserError(
            f"{run.folder}: the run began with the labels {begun}, and the data have {labels.get('labels')} now, so "
            "its heads would mean something else; give the rows their labels back, or start again with --fresh"
        )
    experiment.runtime.clients_per_pass = now["clients_per_pass"] = recorded["clients_per_pass"]
    different = (key for key in now if key != "base" and recorded.get(key) != now[key])
    if changed := [f"{key} {recorded.get(key)} -> {now[key]}" for key in different]:
        reporter.note(
            f"this run began in another environment ({'; '.join(changed)}), so results may differ in the last bits"
        )
        if now not in (others := recorded.get("continued", [])):
            run.remember("environment.json", recorded | {"continued": [*others, now]})


def environment(
    device: torch.device, dtype: str, clients_per_pass: int, fast: Literal["auto", "on", "off"], *, tried: bool = True
) -> dict[str, Json]:
    """The device with its name, the processes and threads, whether training passes are captured, without padding and
    fused, and the versions of the libraries. `tried`: as of `ways.ways`."""
    return {
        **asdict(ways(fast, device, dtype, tried=tried)),
        "clients_per_pass": clients_per_pass,
        "threads": torch.get_num_threads(),
        "processes": processes(),
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "dtype": dtype,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "python": platform.python_version(),
    } | {name: importlib.metadata.version(name) for name in LIBRARIES}


def _processor() -> str:
    """The name of the CPU, as far as the system tells it."""
    try:
        # platform.processor() is empty on most Linux systems
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
