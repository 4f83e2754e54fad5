"""What each of several processes may take of a machine, and whether all of them fit."""

from dataclasses import replace

import psutil
import pytest
import torch

from llm_fed.basics import cgroups
from llm_fed.basics.errors import UserError
from llm_fed.engine.memory import free_memory
from llm_fed.experiment import side_by_side
from llm_fed.experiment.side_by_side import Demand

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
TWO = Demand(processes=2, start=3 * 10**9, training=10**9, free=9 * 10**9)


def test_processes_that_do_not_fit_are_refused_before_anything_is_trained():
    """2 x 3 GB before training."""
    replace(TWO, free=6 * 10**9).check(2)
    with pytest.raises(UserError, match=r"--jobs 2 does not fit: .* 5\.0 GB are free\. --jobs 1 needs less"):
        replace(TWO, free=5 * 10**9).check(2)
    with pytest.raises(UserError, match="--jobs 4 needs less"):  # two of each of two GPUs, of six processes
        replace(TWO, processes=3, free=8 * 10**9).check(6)
    assert "takes about 3.0 GB before it trains and 4.0 GB in training; 9.0 GB are free" in TWO.describe
    assert "in training" not in replace(TWO, training=0).describe


def test_a_comparison_that_does_not_fit(small, tmp_path, llm_fed, monkeypatch):
    monkeypatch.setattr(cgroups, "free_for_all", lambda: 10**8)
    config, out = small.config(tmp_path / "c.yaml"), tmp_path / "out"
    words = ["compare", config, "--methods", "fedit,local", "--out", out, "--jobs"]
    llm_fed(*words, 2).assert_refused("--jobs 2 does not fit", "100.0 MB are free", "--jobs 1")
    llm_fed(*words, 2, "--dry-run").assert_refused("--jobs 2 does not fit")
    assert not out.exists() and llm_fed(*words, 1, "--dry-run").code == 0


@pytest.mark.parametrize("jobs", [0, -1, True, 2.0, "2", None])
def test_a_number_of_jobs_that_is_none(small, tmp_path, jobs):
    import llm_fed

    with pytest.raises(UserError, match="a whole number from 1 on"):
        llm_fed.compare(small.tree(), out=tmp_path / "out", methods=["fedit"], jobs=jobs)


def test_what_other_processes_cannot_have(small, tmp_path, llm_fed, monkeypatch):
    import llm_fed as package
    from llm_fed.runtime import launch

    rows = {"north": [{"question": "w2", "reply": "w3"}] * 4}
    tree = {**small.tree(), "task": {"max_length": 32}}
    with pytest.raises(UserError, match="jobs=2 trains in other processes, which cannot look up objects"):
        package.compare(tree, out=tmp_path / "out", methods=["fedit"], data=rows, jobs=2)
    monkeypatch.setattr(launch, "processes", lambda: 2)
    config = small.config(tmp_path / "c.yaml")
    words = ["compare", config, "--methods", "fedit", "--out", tmp_path / "out"]
    llm_fed(*words, "--jobs", 2).assert_refused("--jobs 2 starts processes of its own", "one of 2 of a launch")
    llm_fed("compare", "--runs", config, "--jobs", 2).assert_refused("--runs", "--jobs")
    for number in ("0", "-1", "two"):
        llm_fed(*words, "--jobs", number).assert_refused("--jobs", number)


def test_a_share_of_threads_and_memory(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(cgroups, "free_for_all", lambda: 9 * 10**9)
    assert side_by_side.shares(3, CPU, True) == [{"OMP_NUM_THREADS": "2", "LLM_FED_MEMORY": "3000000000"}] * 3
    assert [each["OMP_NUM_THREADS"] for each in side_by_side.shares(8, CPU, True)] == ["1"] * 8
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # a user's own
    assert "OMP_NUM_THREADS" not in side_by_side.shares(3, CPU, True)[0]


def test_a_process_plans_with_its_share(monkeypatch):
    own = psutil.Process().memory_info().rss
    monkeypatch.setenv(cgroups.SHARE, str(own + 10**6))
    free, limit = cgroups.free_memory()
    assert free < 10**7 and limit.name == "the share of one of several processes" and limit.size == own + 10**6
    assert free_memory(CPU) < 10**7 < cgroups.free_for_all()
    monkeypatch.setenv(cgroups.SHARE, "a lot")
    assert cgroups.free_memory()[0] > 10**7


@pytest.fixture
def cards(monkeypatch):
    """Two GPUs of 8 GB each, of which 6 are free."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (6 * 10**9, 8 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *device: 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *device: 4 * 10**8)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "current_device", int)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_given_out_in_turn_and_their_memory_is_divided(cards, monkeypatch):
    """Three processes, so that one card has two of them."""
    found = side_by_side.shares(3, GPU, True)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0", "1", "0"]
    assert {each["LLM_FED_GPU_MEMORY"] for each in found} == {str(3 * 10**9 - 2**29)}
    assert "CUDA_VISIBLE_DEVICES" not in side_by_side.shares(3, GPU, False)[0]  # one process has all GPUs
    assert side_by_side.shares(3, GPU, False)[0]["LLM_FED_GPU_MEMORY"] == str(2 * 10**9 - 2**29)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in side_by_side.shares(2, GPU, True)] == ["5", "GPU-ab"]
    _, card = side_by_side.demands(4, 0, 0, GPU, True)
    assert (card.processes, card.start, card.free, card.of) == (2, 2**29, 7 * 10**9, " of cuda:0")
    _, alone = side_by_side.demands(1, 5, 13, GPU, True)
    assert (alone.start, alone.training) == (5 + 2**29, 13)


def test_a_process_keeps_to_its_share_of_a_gpu(cards, monkeypatch):
    fractions = [1.0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *device: fractions[-1])
    side_by_side.keep_to_share()
    assert fractions == [1.0] and free_memory(GPU) == 7 * 10**9 - 4 * 10**8  # alone
    monkeypatch.setenv("LLM_FED_GPU_MEMORY", str(2 * 10**9))
    side_by_side.keep_to_share()
    assert fractions == [1.0, 0.25] and free_memory(GPU) == 2 * 10**9 - 4 * 10**8
