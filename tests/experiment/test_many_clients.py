"""What a run with very many clients does once for all of them, and what it does not hold for each of them. Calls and
objects are counted, not seconds."""

import gc
import json
from collections import Counter
from pathlib import Path

import equal_runs

from llm_fed.basics import documents, files
from llm_fed.bench import build
from llm_fed.experiment import announce, run
from llm_fed.method.requests import Query
from llm_fed.models.base import Base
from llm_fed.rows import Row
from llm_fed.settings import configfile
from llm_fed.tasks.common import Encoded

WORDS = [
    "participation=0.01", "rounds=1", "task.template=plain", "task.max_length=16", "task.validation=0", "device=cpu",
    "adapter.rank=1", "adapter.target_modules=[q_proj]", "local.steps=1", "local.batch_size=1", "eval.metric=rouge1",
    "eval.max_new_tokens=1", "report.samples=0", "method=fedit",
]  # fmt: skip


def config_of(folder: Path, base: Path, clients: int, *words: str):
    """A federation of one file, in which each client has one row to train and one to be tested on."""
    path = folder / f"{clients}.jsonl"
    with open(path, "w") as file:
        for number in range(2 * clients):
            row = {"client": f"c{number % clients}", "answer": "w4 w5"}
            row["question"] = f"w{number % 50 + 2} w{3 + number // clients}"
            file.write(json.dumps(row) + "\n")
    return configfile.load({}, [*WORDS, "task.name=files", f"task.path={path}", f"base.name={base}", *words])


def held() -> int:
    """What of rows and tokens is a Python object now, but for the examples."""
    gc.collect()
    return sum(type(each) in (Encoded, Query, Row) for each in gc.get_objects())


def test_the_start_holds_no_tokens(small, tmp_path):
    """Of 700 clients with 1,400 rows none is encoded afterwards; what was made is kept."""
    clients, before = 700, held()
    built = build.prepare(config_of(tmp_path, small.base, clients), equal_runs.quiet())
    announce.run_plan(built)
    assert len(built.clients) == clients and held() < before + 10
    site = built.clients["c7"]
    assert site.num_examples == 1 and site.train[0].input_ids[-1] == built.base.tokenizer.eos_token_id
    assert site.train[0] is site.train[0]


def test_what_is_scored_and_handed_out_is_prepared_once(small, tmp_path, monkeypatch):
    """Of 20 and of 80 clients: as often is a YAML document read, a metric loaded, the file system synced, and a fresh
    adapter drawn."""
    counts = []
    for clients in (20, 80):
        config = config_of(tmp_path, small.base, clients)
        found = Counter[str]()
        with monkeypatch.context() as patch:
            for module, name in ((documents, "read"), (files, "_syncfs"), (Base, "draw")):
                real, key = getattr(module, name), f"{module.__name__}.{name}"

                def counted(*given, found=found, real=real, key=key, **options):
                    found[key] += 1
                    return real(*given, **options)

                patch.setattr(module, name, counted)
            run.train(config, tmp_path / f"run{clients}", reporter=equal_runs.quiet())
        assert len(list((tmp_path / f"run{clients}/adapters").iterdir())) == clients
        counts.append(found)
    one, other = counts
    assert one["Base.draw"] == other["Base.draw"] > 0
    assert 0 < other["llm_fed.basics.documents.read"] <= one["llm_fed.basics.documents.read"] + 2 < 10
    assert (one["llm_fed.basics.files._syncfs"], other["llm_fed.basics.files._syncfs"]) == (1, 1)
