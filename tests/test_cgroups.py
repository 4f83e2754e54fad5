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
from llm_fed.models import room
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


MOUNT = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:26 {part} {mount} rw,nosuid shared:9 - {kind} {kind} rw,memory\n"


@pytest.mark.parametrize(
    ("mount", "group", "files", "free"),
    [
        # The job's limit of 4 GiB leaves 3, although the step within it has none.
        (("/", "/sys/fs/cgroup", "cgroup2"), "0::/job_7/step_0",
         {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/job_7/memory.max": 4 * GIB,
          "sys/fs/cgroup/job_7/memory.current": GIB, "sys/fs/cgroup/job_7/step_0/memory.current": GIB}, 3 * GIB),
        # Page cache can be taken back, `memory.high` is a limit, too, and the mount point's name has a space.
        (("/", "/mnt/my\\040groups", "cgroup2"), "0::/a b",
         {"mnt/my groups/a b/memory.max": 4 * GIB, "mnt/my groups/a b/memory.high": 3 * GIB,
          "mnt/my groups/a b/memory.current": GIB, "mnt/my groups/a b/memory.stat": f"anon 1\ninactive_file {GIB}\n"},
         3 * GIB),
        # A namespace: the process sees its own group as the root of all.
        (("/", "/sys/fs/cgroup", "cgroup2"), "0::/",
         {"sys/fs/cgroup/memory.max": 2 * GIB, "sys/fs/cgroup/memory.current": 3 * GIB}, 0),
        # A container of old: only its group is mounted, and /proc/self/cgroup has the path on the host.
        (("/docker/x", "/sys/fs/cgroup/memory", "cgroup"), "9:pids:/other\n3:cpu,memory:/docker/x/inner",
         {"sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB, "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
          "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": 9223372036854771712,
          "sys/fs/cgroup/memory/memory.stat": f"inactive_file 3\ntotal_inactive_file {GIB // 2}\n"}, 3 * GIB // 2),
    ],
)  # fmt: skip
def test_the_smallest_rest_on_the_path_counts(tmp_path, mount, group, files, free):
    part, place, kind = mount
    files |= {"proc/self/mountinfo": MOUNT.format(part=part, mount=place, kind=kind), "proc/self/cgroup": f"{group}\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(text))
    assert min(limit.free for limit in cgroups.group_limits(tmp_path)) == free


def test_a_name_that_begins_like_another_is_another(tmp_path):
    """Mounted is /docker/ab, and the process is in /docker/abc: no part of its path is known to be mounted there but
    the root."""
    put(
        tmp_path, proc__self__cgroup="0::/docker/abc\n", sys__fs__cgroup__c__memory_max="1000",
        proc__self__mountinfo="30 22 0:26 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        sys__fs__cgroup__memory_max="3000", sys__fs__cgroup__memory_current="500",
    )  # fmt: skip
    assert [limit.free for limit in cgroups.group_limits(tmp_path)] == [2500]


def test_without_proc_the_root_of_what_is_mounted_counts(tmp_path):
    put(tmp_path, sys__fs__cgroup__memory_max="314572800\n", sys__fs__cgroup__memory_current="104857600\n")
    limit = cgroups.tightest(tmp_path)
    assert limit == cgroups.MemoryLimit("memory.max of the control group /", 314572800, 209715200)


def test_a_group_of_version_1_tells_of_limits_that_are_out_of_sight(tmp_path):
    put(
        tmp_path, proc__self__cgroup="4:memory:/\n", sys__fs__cgroup__memory__memory_stat=
        "hierarchical_memory_limit 5000\ntotal_inactive_file 100\n",
    )  # fmt: skip
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712")
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("1100")
    (limit,) = cgroups.group_limits(tmp_path)
    assert (limit.size, limit.free) == (5000, 4000) and "hierarchical_memory_limit" in limit.name


@pytest.mark.parametrize("text", ["", "max", "-1", "12 kB", "9" * 30, "\x00"])
def test_what_is_no_limit(tmp_path, text):
    assert cgroups.tightest(put(tmp_path, sys__fs__cgroup__memory_max=text)) is None


def test_limits_of_a_shell(tmp_path, monkeypatch):
    """Of 1 MiB of address space the process has taken 10 kB; of data, which has no limit, 5."""
    put(tmp_path, proc__self__status="VmSize:\t  10 kB\nVmData:\t 5 kB\n")
    limits = {resource.RLIMIT_AS: (2**20, 2**30), resource.RLIMIT_DATA: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert cgroups.tightest(tmp_path) == cgroups.MemoryLimit(
        "the limit on address space (ulimit -v)", 2**20, 2**20 - 10240
    )


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
        said = room.shortage(replace(base, dtype=dtype), "cpu")
        assert bool(said) == short and ("memory.max of the control group /job_7" in said) == short
        assert room.shortage(replace(base, dtype=dtype), "cuda:0") == ""
    monkeypatch.setattr(cgroups, "tightest", lambda root=None: None)
    assert room.shortage(base, "cpu") == ""
    assert room.shortage(replace(base, name="cnn"), "cpu") == ""
