"""Adapter folders and data files that somebody else wrote: real ones, changed at random.

Each must be taken, or refused by a UserError or RunError in one or two lines, within 5 s of computing.
"""

import csv
import io
import json
import random
import shutil
import struct
import time
import warnings
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import families
import hostile
import numpy as np
import pandas
import torch
from any_form import EXCEL, compressed
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from llm_fed import tasks
from llm_fed.basics.errors import RunError, UserError
from llm_fed.engine.inference import features, similarity_weights
from llm_fed.experiment import run
from llm_fed.export import peft_folders
from llm_fed.export.copies import public_content
from llm_fed.export.load import load_image_model
from llm_fed.export.origins import check_text
from llm_fed.kinds.language import load_base
from llm_fed.models import lora
from llm_fed.models.prompt import read_prompt
from llm_fed.rows.formats import COMPRESSED, kind_of, opened
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.config import BaseConfig, TaskConfig

_MODELS: dict[str, list[str]] = {  # what is handed out, and by which run
    "local": [], "images": [], "experts": ["method=pfedmoe"], "mix": ["method=feddpa"],
}  # fmt: skip
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int32, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool,
)  # fmt: skip
NAMES = (
    "train.jsonl", "train.json", "train.csv", "train.jsonl.gz", "train.parquet", "a.npz", "train.tsv", "train.txt",
    "train.ndjson.bz2", "train.csv.xz", "train.arrow", *(["train.xlsx"] if EXCEL else []),
)  # fmt: skip
_ROWS = [{"instruction": f"What is {n}?", "input": "", "output": f"It is {n}", "client": f"c{n % 3}"} for n in range(9)]


class Folders:
    """PEFT folders: an adapter, experts with a gate or a mix, and a whole image model."""

    def __init__(self, work: Path):
        self._place = work / "case"
        found = families.write(work, ("local", "images"))
        for name, words in _MODELS.items():
            config = configfile.load(found.get(name, found["local"]), ["rounds=1", *words])
            run.train(config, work / name, reporter=Reporter(Console(quiet=True)))
        self._origins = {name: next((work / name).glob("adapters/*")) for name in _MODELS}
        self._base = load_base(BaseConfig(name=str(work / "base"), dtype="float32"), "cpu")

    def make(self, draw: random.Random) -> Path:
        kind = draw.choice(list(self._origins))
        shutil.rmtree(self._place, ignore_errors=True)
        folder = Path(shutil.copytree(self._origins[kind], self._place / kind))
        for _ in range(draw.randint(1, 2)):
            files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".md"]
            if files:
                _spoil(draw.choice(files), draw)
        return folder

    def survive(self, folder: Path, draw: random.Random) -> None:
        if folder.name == "images":
            model = load_image_model(folder)
            assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
            return
        with suppress(UserError):
            read_prompt(folder)
        with suppress(UserError):
            check_text(folder, BaseConfig(name=self._base.name))
        for path in folder.rglob("*.json"):
            with suppress(UserError):
                public_content(path)
        state, _ = peft_folders.read(folder, self._base)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in (state.row, *state.extras.values()))
        if lora.ANCHORS in state.extras:
            similarity_weights(features(self._base, [[1, 2]]), [state])


class DataFiles:
    """Examples in files of each format, compressed or not, and pictures as npz."""

    def __init__(self, work: Path):
        self._place = work / "case"

    def make(self, draw: random.Random) -> Path:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        path = self._place / draw.choice(NAMES)
        rows: Any = deepcopy(_ROWS)
        for _ in range(draw.randint(0, 3)):
            rows = hostile.changed(rows, draw)
        if path.name == "a.npz":
            np.savez(path, **_arrays(draw))
        else:
            path.write_bytes(_written(path.name, rows))
        if draw.random() < 0.4:
            path.write_bytes(_respoilt(path, draw))
        return path

    def survive(self, path: Path, draw: random.Random) -> None:
        if path.suffix == ".npz":
            tasks.load(TaskConfig(name="images", path=str(path)), 0)
        else:
            tasks.load(TaskConfig(name="files", path=str(draw.choice((path.parent, path)))), 0)


def _written(name: str, rows: Any) -> bytes:
    as_list = rows if isinstance(rows, list) else [rows]
    plain = [row if isinstance(row, dict) else {"value": row} for row in as_list]
    kind, ending = kind_of(name), Path(name).suffix
    if name == "train.json":
        data = json.dumps(rows).encode()
    elif kind == "json":
        data = "".join(json.dumps(row) + "\n" for row in as_list).encode()
    elif kind == "csv":
        file = io.StringIO()
        columns = list(dict.fromkeys(key for row in plain for key in row))
        writer = csv.DictWriter(file, columns, delimiter="\t" if ending == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(plain)
        data = file.getvalue().encode(errors="replace")
    elif kind == "txt":
        data = str(rows).encode(errors="replace")
    else:
        target, frame = io.BytesIO(), pandas.DataFrame(plain)
        {"parquet": frame.to_parquet, "arrow": frame.to_feather, "xlsx": frame.to_excel}[str(kind)](target)
        data = target.getvalue()
    return compressed(data, ending if ending in COMPRESSED else "")


def _arrays(draw: random.Random) -> dict[str, Any]:
    rng = np.random.default_rng(draw.getrandbits(32))
    arrays: dict[str, Any] = {
        "x_train": rng.integers(256, size=(12, 6, 6, 3), dtype=np.uint8), "y_train": np.arange(12) % 3,
        "x_test": rng.integers(256, size=(6, 6, 6, 3), dtype=np.uint8), "y_test": np.arange(6) % 3,
        "client": np.arange(12) % 2,
    }  # fmt: skip
    for _ in range(draw.randint(0, 2)):
        key = draw.choice([*arrays, "classes", "coarse_of_fine", "domain", "test", "x", "y"])
        known = arrays.pop(key, np.arange(3))
        how = draw.randrange(6)
        if how == 1:
            arrays[key] = known.astype(draw.choice(["f4", "i8", "u1", "U3", "c8", "?", "S2", "M8[s]"]))
        elif how == 2:
            arrays[key] = known.reshape(draw.choice([(-1,), (1, -1), (*known.shape, 1)]))
        elif how == 3:
            arrays[key] = known[: draw.randrange(len(known) + 1)]
        elif how == 4:
            arrays[key] = known.astype(np.int64) + draw.choice((-5, 1, 2**24, 2**40, 2**62))
        elif how == 5:
            arrays[key] = np.array(draw.choice((0, "a", np.nan)))
    return arrays


def _respoilt(path: Path, draw: random.Random) -> bytes:
    """A file with changed bytes, within the compression where there is one."""
    if path.suffix in COMPRESSED and draw.random() < 0.5:
        with opened(path) as file:
            return compressed(hostile.changed_bytes(file.read(), draw), path.suffix)
    return hostile.changed_bytes(path.read_bytes(), draw)


def _spoil(path: Path, draw: random.Random) -> None:
    """Change one file of a folder, in its content or its kind."""
    how = draw.random()
    if how < 0.08:
        path.unlink()
        if draw.random() < 0.5:
            path.symlink_to(draw.choice([path.name, "..", "/dev/null", "nowhere"]))
    elif how < 0.25:
        path.write_bytes(hostile.changed_bytes(path.read_bytes() or b"{}", draw))
    elif path.suffix == ".json":
        tree = json.loads(path.read_bytes() or b"{}")
        for _ in range(draw.randint(1, 3)):
            tree = hostile.changed(tree, draw)
        path.write_text(json.dumps(tree))
    elif draw.random() < 0.5:
        _other_tensor(path, draw)
    else:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.get("__metadata__", {}).pop("checksum", None)  # as other programs write it
        for _ in range(draw.randint(1, 2)):
            header = hostile.changed_tensor(header, draw) if draw.random() < 0.7 else hostile.changed(header, draw)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _other_tensor(path: Path, draw: random.Random) -> None:
    """A whole file without a checksum, of which one tensor has another dtype, shape or value, is absent or is new."""
    with safe_open(path, "pt") as file:
        metadata = {name: value for name, value in (file.metadata() or {}).items() if name != "checksum"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    how = draw.randrange(5)
    if how == 0:
        tensors[name] = tensor.to(draw.choice(_DTYPES))
    elif how == 1:
        tensors[name] = tensor.unsqueeze(0) if draw.random() < 0.5 else tensor.flatten()[1:].clone()
    elif how == 2:
        tensors[name] = torch.full_like(tensor, draw.choice((float("nan"), float("inf"), 1e38)))
    elif how == 3:
        tensors |= {name: tensor, draw.choice(("x", "mix.anchors", "mix.scale", f"{name}.x")): tensor.clone()}
    save_file(tensors, path, metadata=metadata)


def tried(kind: Folders | DataFiles, seed: object) -> None:
    """One case of a kind: taken, or refused as it should be.

    Raises:
        AssertionError, and whatever else it should not: a finding.
    """
    draw, began = random.Random(str(seed)), time.process_time()
    try:
        case = kind.make(draw)
    except Exception:
        return  # the change is none that such a file can hold
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.survive(case, draw)
    except (UserError, RunError) as refused:
        assert str(refused) and len(str(refused).splitlines()) <= 2 and len(str(refused)) < 20_000, str(refused)
    assert time.process_time() - began < 5
