"""Runs with engine.padding_free=on, on a CPU: the training that they were, what they record, and how they go on."""

from __future__ import annotations

import every
import pytest
import tiny_base
from pass_runs import CHANGES, adapters, apart, passes

from llm_fed.engine import reading
from llm_fed.runs.records import read_records


@pytest.mark.parametrize("method", every.quick(["fedit", "local", "fedmerge", "fedem"], ["fedem"]))
def test_a_run_without_padding_is_the_run_and_says_what_it_did(method, small, tmp_path, llm_fed, monkeypatch):
    """Its prompts are read without padding, too."""
    read, flat = [], reading.end_to_end
    monkeypatch.setattr(reading, "end_to_end", lambda *given: (read.append(given), flat(*given))[1])
    config = small.config(tmp_path / "c.yaml", **CHANGES)
    plain, free = tmp_path / "plain", tmp_path / "free"
    said = llm_fed("run", config, f"method={method}", "--out", plain)
    assert said.code == 0 and "padding  " not in said.err and not read
    said = llm_fed("run", config, f"method={method}", "engine.padding_free=on", "--out", free)
    assert said.code == 0 and read, said.err
    assert "padding    without padding (engine.padding_free=on), a product per client" in said.err
    assert not passes(plain) and len(counts := passes(free)) == 3
    assert all(count["padded"] == 0 < count["without padding"] and len(count) == 2 for count in counts)
    assert 0 < apart(adapters(plain), adapters(free)) < 5e-6
    assert all(line["padding"] == 0 for line in read_records(free / "metrics.jsonl") if line["kind"] == "round")


def test_a_base_with_windows_trains_without_padding(small, tmp_path, llm_fed):
    """Each token sees three, itself among them, and most texts are longer."""
    runs = {}
    for name, window, words in (("plain", 3, []), ("free", 3, ["engine.padding_free=on"]), ("wide", 4096, [])):
        base = tiny_base.folder(tmp_path / f"base{window}", "mistral", sliding_window=window)
        config = small.config(tmp_path / "c.yaml", **CHANGES | {"rounds": 1}, base={"name": str(base)})
        said = llm_fed("run", config, *words, "--out", tmp_path / name)
        assert said.code == 0, said.err
        runs[name] = adapters(tmp_path / name)
    assert all(count["padded"] == 0 < count["without padding"] for count in passes(tmp_path / "free"))
    assert 0 < apart(runs["plain"], runs["free"]) < 5e-6 < 1e-4 < apart(runs["plain"], runs["wide"])


def test_a_run_that_began_in_rows_may_go_on_without_padding(small, tmp_path, llm_fed):
    """It says that the last bits may differ, and its audit knows; the audit of a run that was never padded is exact."""
    config, run, free = small.config(tmp_path / "c.yaml", **CHANGES), tmp_path / "run", tmp_path / "free"
    assert llm_fed("run", config, "rounds=1", "--out", run).code == 0
    again = llm_fed("run", config, "rounds=2", "--out", run)
    assert again.code == 0 and "another environment" not in again.err
    said = llm_fed("run", config, "engine.padding_free=on", "engine.capture=on", "--out", run)
    assert said.code == 0 and "captured False -> True; padding_free False -> True" in said.err
    assert set(passes(run)[0]) == {"replayed", "as written", "without padding", "padded"}
    audit = llm_fed("audit", run)
    assert "was continued in another environment" in audit.out + audit.err
    assert llm_fed("run", config, "engine.padding_free=on", "--out", free).code == 0
    audit = llm_fed("audit", free)
    assert audit.code == 0 and "another environment" not in audit.out + audit.err


PRIVATE = ("privacy.unit=example", "privacy.clip=1.0", "privacy.noise=0.5")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method=flora"], "frozen weights beneath the adapters"),
        (PRIVATE, "privacy.unit=example needs the gradients of single examples"),
    ],
)
def test_what_does_not_allow_it_is_refused_before_anything_is_trained(words, why, small, tmp_path, llm_fed):
    config = small.config(tmp_path / "c.yaml", **CHANGES)
    said = llm_fed("run", config, *words, "engine.padding_free=on", "--dry-run", "--out", tmp_path / "run")
    said.assert_refused(why, "set engine.padding_free=auto, which pads")
