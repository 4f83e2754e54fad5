"""The memory that a container, a job or a shell leaves to a process, on made-up trees of /proc and /sys."""

import resource
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from llm_fed.basics import cgroups
from llm_fed.basics.errors import UserError
from llm_fed.commands import doctor
from llm_fed.engine import gradients
from llm_fed.engine.memory import free_memory
from llm_fed.experiment import run
from llm_fed.models.loading import shortage
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.local import choose_clients_per_pass
from llm_fed.settings.config import BaseConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State

GIB = 2**30


def put(root: Path, **files: str) -> Path:
    """The files below the root; in their names a double underscore stands for a slash, a single one for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def level(
    folder: str, version: int, most: int | None, usage: int, cache: int = 0, high: int | None = None
) -> dict[str, str]:
    """The files of one group, as the kernel shows them."""
    if version == 1:
        named = {"memory.limit_in_bytes": most or 9223372036854771712, "memory.usage_in_bytes": usage}
        return {f"{folder}/{name}": str(value) for name, value in named.items()} | {
            f"{folder}/memory.stat": f"inactive_file 3\ntotal_inactive_file {cache}\n"
        }
    named = {"memory.max": most or "max", "memory.high": high or "max", "memory.current": usage}
    stat = {f"{folder}/memory.stat": f"anon 1\ninactive_file {cache}\n"}
    return {f"{folder}/{name}": str(value) for name, value in named.items()} | stat


@pytest.mark.parametrize(
    ("version", "path", "levels", "free"),
    [
        (2, "/job/step", {"": (None, 50), "/job": (4000, 1000), "/job/step": (None, 1000)}, 3000),
        (1, "/job/step", {"": (None, 50), "/job": (4000, 1000), "/job/step": (None, 1000)}, 3000),
        (2, "/job/step", {"/job": (4000, 1000), "/job/step": (2000, 900, 400)}, 1500),  # page cache is free
        (1, "/a b", {"": (9000, 0), "/a b": (2000, 900, 400)}, 1500),
        (2, "/job", {"/job": (4000, 1000, 0, 3000)}, 2000),  # memory.high
        (2, "/job", {"/job": (1000, 5000)}, 0),
        (2, "/docker/abc", {"": (3000, 500), "/docker/ab": (1000, 0)}, 2500),  # a container's path is the host's
        (2, "/../..", {"": (3000, 500)}, 2500),
    ],
)
def test_the_smallest_rest_on_the_path_counts(tmp_path, version, path, levels, free):
    where = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    files = {"proc/self/cgroup": f"9:pids:/other\n{'0::' if version == 2 else '3:cpu,memory:'}{path}\n"}
    for name, values in levels.items():
        files |= level(f"{where}{name}", version, *values)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert min(limit.free for limit in cgroups.group_limits(tmp_path)) == free


def test_without_proc_the_root_of_what_is_mounted_counts(tmp_path):
    put(tmp_path, sys__fs__cgroup__memory_max="314572800\n", sys__fs__cgroup__memory_current="104857600\n")
    limit = cgroups.tightest(tmp_path)
    assert limit == cgroups.MemoryLimit("memory.max of the control group /", 314572800, 209715200)


@pytest.mark.parametrize("text", ["", "max", "-1", "12 kB", "9" * 30, "\x00"])
def test_what_is_no_limit(tmp_path, text):
    assert cgroups.tightest(put(tmp_path, sys__fs__cgroup__memory_max=text)) is None


def test_limits_of_a_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (2**50, 2**60)}.__getitem__)
    limit = cgroups.tightest(tmp_path)
    assert limit and limit.name == "the limit on address space (ulimit -v)" and 0 < limit.free < limit.size == 2**50


def test_what_is_free_is_the_smaller_of_the_machine_and_the_limits(tmp_path):
    assert cgroups.free_memory(tmp_path)[1] is None
    free, limit = cgroups.free_memory(put(tmp_path, sys__fs__cgroup__memory_max="1000"))
    assert free == 1000 and limit and limit.size == 1000
    free, limit = cgroups.free_memory(put(tmp_path, sys__fs__cgroup__memory_max=str(2**59)))
    assert 0 < free <= psutil.virtual_memory().total and limit is None


def test_a_limit_counts_wherever_memory_is_planned(small, tmp_path, monkeypatch):
    limit = cgroups.MemoryLimit("memory.max of the control group /job_7", 2 * GIB, 5000)
    monkeypatch.setattr(cgroups, "tightest", lambda root=None: limit)
    cpu, state = torch.device("cpu"), State.of({"a": torch.zeros(50)})
    assert free_memory(cpu) == 5000
    assert choose_clients_per_pass("auto", 9, state, cpu) == 1  # 5000 / 4 / (5 * 4 * 50)
    assert gradients._most_rows(torch.zeros(3, 2, 10)) == 3  # 5000 / 4 / (10 * 4 * 10)
    assert "within memory.max of the control group /job_7, which is 2.0 GiB" in doctor._space()
    with pytest.raises(UserError, match="and 5.0 kB are free"):
        run.dry_run(from_dict(small.tree()), tmp_path / "run", reporter=Reporter(Console(quiet=True)))


def test_a_base_that_does_not_fit_is_told_before_it_is_loaded(small, monkeypatch):
    """Numbers of the tiny base: those of its file."""
    numbers = sum(tensor.numel() for tensor in load_file(small.base / "model.safetensors").values())
    base = BaseConfig(name=str(small.base), dtype="float32")
    for free, dtype, short in (
        (4 * numbers, "float32", False),
        (4 * numbers - 1, "float32", True),
        (2 * numbers, "bfloat16", False),
        (2 * numbers - 1, "bfloat16", True),
    ):
        limit = cgroups.MemoryLimit("memory.max of the control group /job_7", 2 * GIB, free)
        monkeypatch.setattr(cgroups, "tightest", lambda root=None, limit=limit: limit)
        said = shortage(replace(base, dtype=dtype), "cpu")
        assert bool(said) == short and ("memory.max of the control group /job_7" in said) == short
        assert shortage(replace(base, dtype=dtype), "cuda:0") == ""
    monkeypatch.setattr(cgroups, "tightest", lambda root=None: None)
    assert shortage(base, "cpu") == ""
    assert shortage(replace(base, name="cnn"), "cpu") == ""
