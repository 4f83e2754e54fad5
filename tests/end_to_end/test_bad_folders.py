"""Damaged, foreign and full places: run folders, their logs and checkpoints, the disk. Nothing is lost."""

import shutil
from pathlib import Path

import small_process
import yaml
from filelock import FileLock


def test_a_mistake_does_not_cost_the_earlier_run(small, llm_fed, tmp_path):
    """--fresh deletes what is there only when the new run can start, and the mistake itself is not remembered."""
    config = small.config(tmp_path / "c.yaml", rounds=1)
    assert llm_fed("run", config, "--out", tmp_path / "a").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    for word in ("task.path=nowhere", "base.name=./nowhere", "method=fedmrge", "adapter.target_modules=[qproj]"):
        llm_fed("run", config, word, "--out", tmp_path / "a", "--fresh").assert_refused()
    assert {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()} == before
    assert llm_fed("run", config, "--out", tmp_path / "a").code == 0


def test_folders_that_hold_something_else(small, llm_fed, tmp_path):
    """Neither a file, nor a folder of the user's, nor one with a configuration of theirs is written to or emptied."""
    config = small.config(tmp_path / "config.yaml")
    llm_fed("run", config, "--out", config).assert_refused("cannot make the run folder", "exists")
    llm_fed("run", config, "--out", config / "run").assert_refused("cannot make the run folder")
    (tmp_path / "thesis.tex").write_text("precious")
    for fresh in ([], ["--fresh"]):
        llm_fed("run", config, "--out", tmp_path, *fresh).assert_refused("is not a run folder", "give another --out")
    assert (tmp_path / "thesis.tex").read_text() == "precious" and "rounds: 3" in config.read_text()


def test_fresh_leaves_the_users_own_files(small, llm_fed, tmp_path):
    config = small.config(tmp_path / "c.yaml", rounds=1)
    assert llm_fed("run", config, "--out", tmp_path / "a").code == 0
    (tmp_path / "a/notes.txt").write_text("precious")
    assert llm_fed("run", config, "seed=1", "--out", tmp_path / "a", "--fresh").code == 0
    assert (tmp_path / "a/notes.txt").read_text() == "precious"


def test_a_damaged_run_folder(small, llm_fed, tmp_path):
    config = small.config(tmp_path / "c.yaml", rounds=1)
    assert llm_fed("run", config, "--out", tmp_path / "a").code == 0
    (tmp_path / "a/summary.json").write_text('{"round": ')
    llm_fed("run", config, "--out", tmp_path / "a").assert_refused("summary.json is damaged", "--fresh", code=1)
    (tmp_path / "a/config.yaml").write_text("rounds: [1")
    llm_fed("run", config, "--out", tmp_path / "a").assert_refused("a/config.yaml is damaged", "--fresh")
    llm_fed("eval", tmp_path / "a").assert_refused("a/config.yaml is damaged")
    assert llm_fed("run", config, "--out", tmp_path / "a", "--fresh").code == 0


def test_torn_and_cut_logs(small, llm_fed, finished, tmp_path):
    """Half a line at the end is what a power failure leaves, and is cut; what a checkpoint saw must be there."""
    config = small.config(tmp_path / "c.yaml", **yaml.safe_load((finished / "config.yaml").read_text()))
    for name in ("torn", "cut"):
        shutil.copytree(finished, tmp_path / name)
        (tmp_path / name / "summary.json").unlink()
    for file in ("metrics.jsonl", "timing.jsonl"):
        with open(tmp_path / "torn" / file, "a") as log:
            log.write('{"kind": "rou')
    assert llm_fed("run", config, "--out", tmp_path / "torn").code == 0
    assert (tmp_path / "torn/metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    timing = (tmp_path / "torn/timing.jsonl").read_bytes()  # the end was done again, which took its time
    assert timing.startswith((finished / "timing.jsonl").read_bytes()) and timing.endswith(b"}\n")
    cut(tmp_path / "cut/metrics.jsonl")
    said = llm_fed("run", config, "--out", tmp_path / "cut")
    said.assert_refused("metrics.jsonl has 50 bytes, but", "--fresh", code=1)


def test_two_processes_on_one_run_folder(small, tmp_path):
    """The second one says so and leaves the folder as it is."""
    config, log = small.config(tmp_path / "c.yaml"), tmp_path / "log"
    (tmp_path / "a").mkdir()
    with FileLock(tmp_path / "a/.lock"):
        assert small_process.llm_fed(["run", str(config), "--out", str(tmp_path / "a"), "--fresh"], log) == 1
    assert log.read_text() == (
        f"llm-fed: another process is writing to {tmp_path / 'a'}; wait for its end, or name another folder\n"
    )
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]


def test_damaged_checkpoints_of_a_killed_run(small, tmp_path):
    """The newest is cut short: a warning names it, and the run continues one round earlier. With none left it stops."""
    config, log = small.config(tmp_path / "c.yaml", checkpoint={"keep": 3}), tmp_path / "log"
    words = ["run", str(config), "--out", str(tmp_path / "a")]
    small_process.llm_fed(words, log, small_process.Kill("llm_fed.engine.fit:FusedFit.step", 6))  # in round 3
    cut(tmp_path / "a/checkpoints/round-0002/state.safetensors")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert small_process.llm_fed(words, log) == 0
    assert "round-0002 is damaged" in log.read_text() and "continuing at round 2" in log.read_text()
    cut(tmp_path / "b/checkpoints/round-0001/manifest.json")
    assert small_process.llm_fed([*words[:-1], str(tmp_path / "b")], log) == 1
    assert "llm-fed: every checkpoint in" in log.read_text() and "--fresh" in log.read_text()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def test_a_full_disk(small, tmp_path):
    """An error names the file and says what to do, nothing half-written stays, and with room the run goes on."""
    config, log = small.config(tmp_path / "c.yaml", rounds=1), tmp_path / "log"
    words = ["run", str(config), "adapter.rank=16", "--out", str(tmp_path / "a")]
    assert small_process.llm_fed(words, log, largest_file=5000) == 1
    (last,) = (line for line in log.read_text().splitlines() if line.startswith("llm-fed: "))
    assert last.startswith("llm-fed: cannot write ") and "the checkpoint of round 1" in last
    assert "File too large" in last and not list((tmp_path / "a").rglob("*.partial"))
    assert small_process.llm_fed(words, log) == 0
    assert (tmp_path / "a/report.html").exists()
