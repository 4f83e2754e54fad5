"""Configurations, adapter folders and data files that somebody else wrote: real ones, changed at random.

    PYTHONPATH=tests/support python tests/support/fuzz.py --kinds configurations folders data --cases 10000

Each must be taken, or refused by a UserError or RunError in one or two lines, within 5 s of computing, in a process
that may take 2 GiB more than it had with all imports. What fails is written to FOLDER; once it is mended, what was
wrong becomes a test.
"""

import csv
import io
import json
import random
import shutil
import struct
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import campaign
import families
import hostile
import numpy as np
import pandas
import torch
import yaml
from any_form import EXCEL, compressed
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from llm_fed import methods, tasks
from llm_fed.basics.errors import RunError, UserError
from llm_fed.bench import parents
from llm_fed.bench.build import prepare
from llm_fed.commands.compare import load_rows
from llm_fed.engine.inference import features, similarity_weights
from llm_fed.export import peft_folders
from llm_fed.export.copies import public_content
from llm_fed.export.origins import check_text
from llm_fed.federation import privacy
from llm_fed.kinds.language import load_base
from llm_fed.models import lora
from llm_fed.models.prompt import read_prompt
from llm_fed.rows.formats import COMPRESSED, kind_of, opened
from llm_fed.runs.trackers import check_trackers
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.config import BaseConfig, Config, TaskConfig

DEEP = 0.01  # share of the configurations that were taken with which all is built that a run needs
_KEYS = sorted(configfile.flat(configfile.as_dict(Config())))
_WORDS = (
    "", "null", "true", "-1", "0", "1e400", "9" * 400, "nan", "[]", "[1,", "{a: b", "[=x", "- 1", "${",
    "${oc.env:HOME}", "${rounds}", "${a.b}", "???", "\x1b[31m", "\udc80", "../..", "/", "hf://", "hf://a/b/c", "*",
    "&a", "!!python/object:os", "x" * 300, "2024-01-01", "0x1F", "1_000", "é", "\u202e", "'", '"', "a=b", "a.b.c=1",
    "a[0]=1", "auto", "none:None", "os:system",
)  # fmt: skip
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


class Configurations:
    """YAML files and `key=value` words."""

    def __init__(self, work: Path):
        found = families.write(work)
        here = Path(__file__).parents[2]
        files = [*found.values(), *sorted((here / "scripts/runs").glob("*.yaml"))]
        self._texts = [file.read_text() for file in files]
        self._trees = [yaml.safe_load(text) for text in self._texts] + [configfile.as_dict(Config())]
        self._file = work / "mine.yaml"

    def make(self, draw: random.Random) -> tuple[bytes, list[str]]:
        words = [self._word(draw) for _ in range(draw.choice((0, 0, 1, 2)))]
        if draw.random() < 0.3:
            return hostile.changed_bytes(draw.choice(self._texts).encode(), draw), words
        tree = deepcopy(draw.choice(self._trees))
        for _ in range(draw.randint(0, 3)):
            tree = hostile.changed(tree, draw)
        text = yaml.safe_dump(tree, allow_unicode=draw.random() < 0.5, sort_keys=False)
        return text.encode(errors="surrogatepass"), words

    def _word(self, draw: random.Random) -> str:
        key, value = draw.choice(_KEYS), draw.choice(_WORDS)
        shape = draw.randrange(8)
        if shape == 0:
            return value
        if shape == 1:
            return f"{draw.choice(_WORDS)}={value}"
        if shape == 2:
            return f"{key.rpartition('.')[0] or key}={value}"
        return f"{key}={draw.choice((value, str(draw.randint(-3, 10**6))))}"

    def survive(self, case: tuple[bytes, list[str]], draw: random.Random) -> None:
        text, words = case
        self._file.write_bytes(text)
        config = configfile.load(self._file, words)
        load_rows(self._file)
        method = methods.build(config.method)
        parents.check(config, method)
        check_trackers(config.track)
        privacy.check(config, method)
        tasks.find(config.task.name)
        yaml.safe_dump(configfile.as_dict(config))
        if draw.random() < DEEP and str(config.base.name).startswith(tempfile.gettempdir()):
            prepare(config, Reporter(Console(quiet=True)))

    def keep(self, case: tuple[bytes, list[str]], out: Path) -> None:
        out.with_suffix(".yaml").write_bytes(case[0])
        out.with_suffix(".words").write_text(json.dumps(case[1]))


class _Files:
    """Cases that are one folder, at the same place each time."""

    def __init__(self, work: Path):
        self.place = work / "case"

    def empty(self) -> Path:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        return self.place

    def keep(self, case: Path, out: Path) -> None:
        shutil.copytree(case, out, symlinks=True, dirs_exist_ok=True)


class Folders(_Files):
    """PEFT folders: an adapter, experts with a gate or a mix, and a whole image model."""

    def __init__(self, work: Path):
        from llm_fed.experiment import run

        super().__init__(work)
        found = families.write(work, ("local", "images"))
        for name, words in _MODELS.items():
            config = configfile.load(found.get(name, found["local"]), ["rounds=1", *words])
            run.train(config, work / name, reporter=Reporter(Console(quiet=True)))
        self._origins = {name: next((work / name).glob("adapters/*")) for name in _MODELS}
        self._base = load_base(BaseConfig(name=str(work / "base"), dtype="float32"), "cpu")

    def make(self, draw: random.Random) -> Path:
        kind = draw.choice(list(self._origins))
        folder = self.empty() / kind
        shutil.copytree(self._origins[kind], folder)
        for _ in range(draw.randint(1, 2)):
            files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".md"]
            if files:
                _spoil(draw.choice(files), draw)
        return self.place

    def survive(self, case: Path, draw: random.Random) -> None:
        from llm_fed.export.load import load_image_model

        (folder,) = case.iterdir()
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


class DataFiles(_Files):
    """Examples in files of each format, compressed or not, and pictures as npz."""

    def make(self, draw: random.Random) -> Path:
        name = draw.choice(NAMES)
        path = self.empty() / name
        rows: Any = deepcopy(_ROWS)
        for _ in range(draw.randint(0, 3)):
            rows = hostile.changed(rows, draw)
        if name == "a.npz":
            np.savez(path, **_arrays(draw))
        else:
            path.write_bytes(_written(name, rows))
        if draw.random() < 0.4:
            path.write_bytes(_respoilt(path, draw))
        return self.place

    def survive(self, case: Path, draw: random.Random) -> None:
        (path,) = case.iterdir()
        if path.suffix == ".npz":
            tasks.load(TaskConfig(name="images", path=str(path)), 0)
        else:
            tasks.load(TaskConfig(name="files", path=str(draw.choice((case, path)))), 0)


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
        target = io.BytesIO()
        frame = pandas.DataFrame(plain)
        write = {"parquet": frame.to_parquet, "arrow": frame.to_feather, "xlsx": frame.to_excel}[str(kind)]
        write(target)
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
        known = arrays.get(key, np.arange(3))
        how = draw.randrange(6)
        if how == 0:
            arrays.pop(key, None)
        elif how == 1:
            arrays[key] = known.astype(draw.choice(["f4", "i8", "u1", "U3", "c8", "?", "S2", "M8[s]"]))
        elif how == 2:
            arrays[key] = known.reshape(draw.choice([(-1,), (1, -1), (*known.shape, 1)]))
        elif how == 3:
            arrays[key] = known[: draw.randrange(len(known) + 1)]
        elif how == 4:
            arrays[key] = known.astype(np.int64) + draw.choice((-5, 1, 2**24, 2**40, 2**62))
        else:
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
            path.mkdir()
        elif draw.random() < 0.5:
            path.symlink_to(draw.choice([path.name, "..", "/dev/null", "nowhere"]))
    elif how < 0.25:
        path.write_bytes(hostile.changed_bytes(path.read_bytes() or b"{}", draw))
    elif path.suffix == ".json":
        tree = json.loads(path.read_bytes() or b"{}")
        for _ in range(draw.randint(1, 3)):
            tree = hostile.changed(tree, draw)
        path.write_text(json.dumps(tree))
    elif path.suffix == ".safetensors" and draw.random() < 0.5:
        _other_tensor(path, draw)
    elif path.suffix == ".safetensors":
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


KINDS: dict[str, Any] = {"configurations": Configurations, "folders": Folders, "data": DataFiles}


def survive(kind: Any, case: Any, draw: random.Random) -> bool:
    """Whether a case was taken; refused it is as it should be.

    Raises:
        AssertionError, and whatever else it should not: a finding.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.survive(case, draw)
    except (UserError, RunError) as refused:
        assert str(refused) and len(str(refused).splitlines()) <= 2, str(refused)
        assert len(str(refused)) < 20_000, len(str(refused))
        return False
    return True


def cases(given: Any) -> Iterator[campaign.Case]:
    with tempfile.TemporaryDirectory() as work:
        made = [(name, KINDS[name](Path(work))) for name in given.kinds]
        draw = random.Random("warm")
        for _, kind in made:
            for _ in range(30):  # so that all is loaded
                with suppress(Exception):
                    survive(kind, kind.make(draw), draw)
        campaign.bound_memory()
        for name, kind in made:
            for number in range(given.cases):
                yield f"{name} {number}", partial(tried, kind, given.out / f"{name}-{given.seed}-{number}")


def tried(kind: Any, out: Path) -> str:
    draw = random.Random(out.name.partition("-")[2])
    try:
        case = kind.make(draw)
    except Exception:
        return "not made"  # the change is none that such a file can hold
    try:
        return "taken" if survive(kind, case, draw) else "refused"
    except BaseException:
        out.parent.mkdir(parents=True, exist_ok=True)
        kind.keep(case, out)
        raise


if __name__ == "__main__":
    campaign.main(__doc__, cases, seconds=5, kinds=tuple(KINDS), cases=10_000, seed=0, out=Path("fuzzed"))
