"""What each of several processes may take of a machine, and whether all of them fit."""

import psutil
import pytest
import torch

from llm_fed.basics import cgroups
from llm_fed.basics.errors import UserError
from llm_fed.engine.memory import free_memory
from llm_fed.experiment.side_by_side import shares

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def test_a_comparison_that_does_not_fit(small, tmp_path, llm_fed, monkeypatch):
    monkeypatch.setattr(cgroups, "free_for_all", lambda: 10**8)
    config, out = small.config(tmp_path / "c.yaml"), tmp_path / "out"
    words = ["compare", config, "--methods", "fedit,local", "--out", out, "--jobs"]
    llm_fed(*words, 2).assert_refused("--jobs 2 does not fit: 2 at a time", "MB are free", "--jobs 1 needs less")
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
    monkeypatch.setattr(cgroups, "free_for_all", lambda: 90 * 10**9)
    assert shares(3, 3, 0, CPU, False) == [{"OMP_NUM_THREADS": "2", "LLM_FED_MEMORY": "30000000000"}] * 3
    assert [each["OMP_NUM_THREADS"] for each in shares(8, 8, 0, CPU, False)] == ["1"] * 8
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # a user's own
    assert "OMP_NUM_THREADS" not in shares(3, 3, 0, CPU, False)[0]


def test_a_process_plans_with_its_share(monkeypatch):
    own = psutil.Process().memory_info().rss
    monkeypatch.setenv(cgroups.SHARE, str(own + 10**6))
    free, limit = cgroups.free_memory()
    assert free < 10**7 and limit.name == "the share of one of several processes" and limit.size == own + 10**6
    assert free_memory(CPU) < 10**7 < cgroups.free_for_all()
    monkeypatch.setenv(cgroups.SHARE, "a lot")
    assert cgroups.free_memory()[0] > 10**7


def test_each_run_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares(2, 2, 0, GPU, False)] == ["0", "1"]
    with pytest.raises(UserError, match="--jobs 9 does not fit: each of 3 runs takes a GPU. --jobs 2 needs less"):
        shares(9, 3, 0, GPU, False)
    with pytest.raises(UserError, match="--jobs 1 needs less"):
        shares(2, 2, 0, GPU, True)  # one process has all
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares(2, 2, 0, GPU, False)] == ["5", "GPU-ab"]
