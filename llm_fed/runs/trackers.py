"""Experiment trackers (TensorBoard, Weights & Biases, MLflow and Accelerate's others): the same names in each, over
rounds and optimizer steps."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from llm_fed.basics.documents import Json, load_json
from llm_fed.basics.errors import UserError, install, require
from llm_fed.basics.files import read_file, write_file
from llm_fed.settings.config import Config, TrackConfig
from llm_fed.settings.configfile import as_dict, flat
from llm_fed.settings.paths import public

FOLDER = "trackers"
_IDS, _STEPS = "ids.json", "steps.json"  # of the runs in the trackers; by round, the steps up to its end
_FORBIDDEN = re.compile(r"[^\w.\- :/]")  # in a name of MLflow, hence in all, so that names are the same everywhere


def check_trackers(track: TrackConfig) -> None:
    """Refuse a tracker that Accelerate does not know, or whose package is not installed. UserError: the name, and what
    to do."""
    for name in track.with_:
        require("track.with", name, LOGGER_TYPE_TO_CLASS)
        if importlib.util.find_spec(name) is None:
            raise UserError(f"track.with names {name}, which is not installed; {install('track')}")


class Trackers:
    """Those that a configuration names. All that they write by themselves lies in `folder`, and a run that continues
    goes on in the same entry of each. `run`: the run folder."""

    def __init__(self, config: Config, run: Path):
        self._name, self.folder = run.absolute().name, run.absolute() / FOLDER
        self._steps = 0
        self._restore: set[str] = set()  # variables that go again
        self._own: list[Any] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept = _read(self.folder / _STEPS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._begin(config)
            except BaseException:
                self.close()
                raise

    def _begin(self, config: Config) -> None:
        ids = before = _read(self.folder / _IDS)
        makers = {"wandb": self._wandb, "mlflow": self._mlflow}
        made = {name: makers[name](ids.get(name)) for name in config.track.with_ if name in makers}
        accelerator = Accelerator(log_with=list(config.track.with_), project_dir=self.folder)
        accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "llm_fed"), init_kwargs=made)
        self._own = list(accelerator.trackers)
        plain = {
            _FORBIDDEN.sub("_", key): value if isinstance(value, int | float | str) else str(value)
            for key, value in flat(public(as_dict(config))).items()
        }
        for tracker in self._own:
            if tracker.name == "mlflow":
                ids = {**ids, "mlflow": tracker.tracker.info.run_id}
                if "mlflow" in before:  # which refuses parameters that have changed
                    continue
            elif tracker.name == "wandb":
                ids = {**ids, "wandb": tracker.tracker.id}
                for name in ("round", "step"):
                    tracker.tracker.define_metric(name)
                tracker.tracker.define_metric("*", step_metric="round")
                tracker.tracker.define_metric("step/*", step_metric="step")
            tracker.store_init_configuration(plain)
        self._write(_IDS, ids)

    def _wandb(self, id: str | None) -> dict[str, Any]:
        import wandb

        for key in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            self._set(key, str(self.folder / "wandb-files"))
        logged_in = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
        mode = {} if "WANDB_MODE" in os.environ or logged_in else {"mode": "offline"}
        settings = wandb.Settings(symlink=False, silent=True, console="off")  # a run folder holds no links
        return {
            "dir": str(self.folder), "id": id or uuid.uuid4().hex[:8], "resume": "allow", "name": self._name,
            "settings": settings, **mode,
        }  # fmt: skip

    def _mlflow(self, id: str | None) -> dict[str, Any]:
        self._set("MLFLOW_DISABLE_TELEMETRY", "true")  # of which it keeps a file at home
        import mlflow

        location: dict[str, Any] = {}
        if "MLFLOW_TRACKING_URI" not in os.environ and not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{self.folder / 'mlflow.db'}")
            self._restore.add("MLFLOW_TRACKING_URI")
            location = {"logging_dir": (self.folder / "mlflow").as_uri()}
        return {"run_id": id, "run_name": self._name, "nested_run": mlflow.active_run() is not None, **location}

    def _set(self, key: str, value: str) -> None:
        if key not in os.environ:
            self._restore.add(key)
            os.environ[key] = value

    def resumed(self, round: int) -> None:
        """The run goes on after this round."""
        self._steps = max((steps for key, steps in self._kept.items() if int(key) <= round), default=0)
        self._kept = {key: steps for key, steps in self._kept.items() if int(key) <= round}

    def log(self, values: Mapping[str, float], round: int) -> None:
        """Numbers of a round, by name."""
        self._log(values, "round", round)

    def step(self, loss: float | None) -> None:
        """An optimizer step of a pass over clients, and the mean of their losses, where it is known."""
        self._steps += 1
        if loss is not None:
            self._log({"step/loss": loss}, "step", self._steps)

    def round_ended(self, round: int) -> None:
        """Keep how many steps there were, for a run that continues here."""
        self._kept[str(round)] = self._steps
        self._write(_STEPS, self._kept)

    def _log(self, values: Mapping[str, float], axis: str, location: int) -> None:
        named = {_FORBIDDEN.sub("_", name): value for name, value in values.items()}
        for tracker in self._own if named else ():
            if tracker.name == "wandb":  # whose steps must not go back, so each axis is a value of its own
                tracker.tracker.log({**named, axis: location})
            else:
                tracker.log(named, step=location)

    def close(self) -> None:
        """Close all of them; not by Accelerate's end_training(), which would also part the ranks of a launch."""
        for tracker in self._own:
            tracker.finish()
        self._own = []
        if "MLFLOW_TRACKING_URI" in self._restore:
            import mlflow

            mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # back to its own default
        for key in self._restore:
            os.environ.pop(key, None)
        self._restore.clear()

    def _write(self, name: str, values: Mapping[str, Json]) -> None:
        write_file(self.folder / name, json.dumps(values).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        values = load_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
