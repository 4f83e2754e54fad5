"""Damaged run folders are named in a line, whatever is damaged."""

import itertools
import json
import random
import shutil

import damage
import pytest

from llm_fed.basics import checksum


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> damage.Damaged:
    return damage.Damaged(tmp_path_factory.mktemp("damaged"), ("fedmerge",))


# Once a traceback, or taken: (file, line or None, key, value that it gets; ... to delete the key).
ONCE_FELL = [
    ("metrics.jsonl", "client", "bytes_up", "x"),
    ("metrics.jsonl", "client", "client", "\x1b[31mred"),
    ("metrics.jsonl", "round", "padding", ...),
    ("metrics.jsonl", "score", "mean", float("nan")),
    ("metrics.jsonl", "score", "clients", {"ada": 10**400}),
    ("metrics.jsonl", "score", "losses", ...),
    ("metrics.jsonl", "server", "chosen", {"ada": 2**62}),
    ("timing.jsonl", None, "seconds", 10**400),
    ("samples.jsonl", None, "answer", ...),
    ("digests.jsonl", "round", "metrics", 3),
    ("summary.json", None, "scores", 1),
    ("summary.json", None, "method", ...),
    ("environment.json", None, "clients_per_pass", "x"),
    ("environment.json", None, "base", {"name": "a", "weights": 7}),
    ("splits.json", None, "written", 10**400),
    ("splits.json", None, "splits", "eAE="),
    ("cross.json", None, "scores", [[1]]),
    ("inputs.json", None, "base.name", 7),
]


@pytest.mark.parametrize(("file", "kind", "key", "value"), ONCE_FELL)
def test_a_damaged_value_is_named(damaged, finished, llm_fed, tmp_path, file, kind, key, value):
    from llm_fed.basics.errors import UserError
    from llm_fed.runs import records

    path = shutil.copytree(damaged.folder / "origins" / "fedmerge", tmp_path / "run") / file
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else []
    target = (
        next(line for line in lines if kind is None or line["kind"] == kind) if lines else json.loads(path.read_text())
    )
    target.pop(checksum.KEY, None)
    if value is ...:
        del target[key]
    else:
        target[key] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) or json.dumps(target))
    if lines:
        with pytest.raises(UserError, match=f"{file}, line .* is damaged: "):
            records.read_records(path)
    elif file == "splits.json":
        llm_fed("eval", tmp_path / "run").assert_refused("splits.json is damaged", code=1)
    else:
        with pytest.raises(ValueError, match=key.partition(".")[0]):
            records.read_object(path)


def test_damage_anywhere(damaged):
    """A sample; the same every time."""
    for case in itertools.islice(damaged.cases(random.Random(7)), 12):
        assert damaged.check(*case) == "", case


@pytest.mark.slow
@pytest.mark.parametrize("name", damage.NAMES)
def test_damage_in_many_places(tmp_path, name):
    damaged = damage.Damaged(tmp_path, (name,))
    found = {case: damaged.check(*case) for case in itertools.islice(damaged.cases(random.Random(name)), 500)}
    assert not any(found.values()), {case: wrong for case, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("command", "file", "text", "named"),
    [
        ("json", "summary.json", b'"rounds"', True),
        ("json", "config.yaml", b"seed: 0", True),
        ("json", "adapters/ada/adapter_config.json", b'"lora_alpha": 8', True),
        ("json", "adapters/ada/adapter_model.safetensors", b"lora_B", True),
        ("json", "adapters/ada/README.md", b"ada", False),
        ("half", "checkpoints/round-0002/manifest.json", b"sha256", False),  # an earlier one is whole
        ("half", "metrics.jsonl", b'"loss": ', True),
        ("half", "timing.jsonl", b"parts", True),
    ],
)
def test_a_flipped_bit_is_named_or_without_effect(damaged, command, file, text, named):
    """The last bit of the last letter of a text: still JSON or YAML, but another one."""
    data = (damaged.origin("fedmerge", command) / file).read_bytes()
    assert damaged.names_flip("fedmerge", command, file, data.index(text) + len(text) - 1, 0) is named


# (file, command, exit codes): a reader that opens the file waits for a writer that never comes.
PIPES = [
    ("metrics.jsonl", ["compare", "--runs", "RUN", "RUN"], {2}),
    ("metrics.jsonl", ["audit", "RUN"], {1, 2}),
    ("config.yaml", ["audit", "RUN"], {1, 2}),
    ("secret", ["audit", "RUN"], {3}),
    ("delivered.json", ["audit", "RUN"], {1, 2, 3}),
    ("delivered.json", ["eval", "RUN", "--cross"], {0}),
    ("checkpoints/*/manifest.json", ["audit", "RUN"], {1, 3}),
    ("checkpoints/*/state.safetensors", ["audit", "RUN"], {1, 3}),
    ("checkpoints/*/state.safetensors", ["eval", "RUN@1"], {1, 2}),
    ("adapters/ada/README.md", ["report", "RUN"], {0}),
    ("adapters/ada/README.md", ["push", "RUN", "ann", "--dry-run"], {2}),
    ("adapters/ada/adapter_config.json", ["eval", "RUN"], {2}),
    ("adapters/ada/adapter_config.json", ["export", "RUN", "OUT"], {0}),
    ("adapters/ada/adapter_model.safetensors", ["eval", "RUN"], {2}),
    (".lock.3", ["run", "RUN/config.yaml", "--out", "RUN"], {0}),
]


@pytest.mark.parametrize(("file", "words", "codes"), PIPES, ids=lambda value: str(value)[:40])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(damaged, llm_fed, tmp_path, file, words, codes):
    import os

    run = shutil.copytree(damaged.folder / "origins" / "fedmerge", tmp_path / "run")
    for path in list(run.glob(file)) or [run / file]:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    said = llm_fed(*(word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in words))
    assert said.code in codes and "Traceback" not in said.err, said


def test_names_of_adapter_folders_do_not_reach_the_terminal_as_they_are(damaged, llm_fed, tmp_path, monkeypatch):
    import io
    import sys

    run = shutil.copytree(damaged.folder / "origins" / "fedmerge", tmp_path / "run")
    (run / "adapters" / "ada").rename(run / "adapters" / "\x1b[31mred\x07")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/client\n/client x\n"))
    for words in (["chat", run], ["audit", run], ["export", run, tmp_path / "out"]):
        said = llm_fed(*words)
        assert "red" in said.out + said.err and not set("\x1b\x07") & set(said.out + said.err), said
