"""Whose a file is: listings of names, and what is made of them."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_fed.basics.errors import UserError
from llm_fed.rows.layout import DEEPEST, FolderLayout, plan


def told(*names: str, **how) -> dict:
    """{client: {split: files}}"""
    found: dict = {}
    for part in plan(names, "D", **how).parts:
        found.setdefault(part.client, {})[part.split] = list(part.files)
    return found


READ = {  # what each listing means
    "a file per client": (
        ["client10.jsonl", "client2.csv", "a.b.parquet"],
        {"a.b": {"train": ["a.b.parquet"]}, "client2": {"train": ["client2.csv"]},
         "client10": {"train": ["client10.jsonl"]}},
    ),
    "suffixes in any case, and a name that begins with an underscore": (
        ["TURKU.CSV", "oulu.Tsv", "pori.NDJSON.GZ", "_malmo.jsonl"],
        {name: {"train": [file]} for name, file in
         [("TURKU", "TURKU.CSV"), ("_malmo", "_malmo.jsonl"), ("oulu", "oulu.Tsv"), ("pori", "pori.NDJSON.GZ")]},
    ),
    "split files per client": (
        ["n-train.csv", "n_test.csv", "n.DEV.csv", "s.jsonl"],
        {"n": {"train": ["n-train.csv"], "validation": ["n.DEV.csv"], "test": ["n_test.csv"]},
         "s": {"train": ["s.jsonl"]}},
    ),
    "the split in front": (
        ["train_n.jsonl", "test_n.jsonl", "train_s.jsonl"],
        {"n": {"train": ["train_n.jsonl"], "test": ["test_n.jsonl"]}, "s": {"train": ["train_s.jsonl"]}},
    ),
    "names that only look like splits": (
        ["dev-team.jsonl", "train-station.jsonl", "dev1.jsonl"],
        {name: {"train": [f"{name}.jsonl"]} for name in ("dev-team", "dev1", "train-station")},
    ),
    "a folder per client, with shards of its own": (
        ["n/train-00000-of-00002.jsonl", "n/train-00001-of-00002.jsonl", "s/data/train.jsonl", "s/data/test.jsonl"],
        {"n": {"train": ["n/train-00000-of-00002.jsonl", "n/train-00001-of-00002.jsonl"]},
         "s": {"train": ["s/data/train.jsonl"], "test": ["s/data/test.jsonl"]}},
    ),
    "files of any name in a client's folder": (
        ["n/2023.jsonl", "n/2024.jsonl", "s/all.csv", "s/test.csv"],
        {"n": {"train": ["n/2023.jsonl", "n/2024.jsonl"]}, "s": {"train": ["s/all.csv"], "test": ["s/test.csv"]}},
    ),
    "a folder per split": (
        ["train/n.jsonl", "train/s.jsonl", "test/n.jsonl", "test/s.jsonl"],
        {name: {"train": [f"train/{name}.jsonl"], "test": [f"test/{name}.jsonl"]} for name in "ns"},
    ),
    "a folder of folders that an archive has put into another": (
        ["clinics/n.jsonl", "clinics/s.jsonl"],
        {name: {"train": [f"clinics/{name}.jsonl"]} for name in "ns"},
    ),
    "shards of the Hub": (
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        {None: {"train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
                "test": ["data/test-00000-of-00001.parquet"]}},
    ),
    "older shards of the Hub, and shards that count from 1": (
        ["train-00001-of-00002-2a1df75c6bce91ab.parquet", "train-00002-of-00002-2a1df75c6bce91ab.parquet"],
        {None: {"train": ["train-00001-of-00002-2a1df75c6bce91ab.parquet",
                          "train-00002-of-00002-2a1df75c6bce91ab.parquet"]}},
    ),
    "the Hub's Parquet branch": (
        ["default/train/0000.parquet", "default/test/0000.parquet"],
        {None: {"train": ["default/train/0000.parquet"], "test": ["default/test/0000.parquet"]}},
    ),
    "shards of clients side by side": (
        ["n-train-00000-of-00002.parquet", "n-train-00001-of-00002.parquet", "n-test-00000-of-00001.parquet"],
        {"n": {"train": ["n-train-00000-of-00002.parquet", "n-train-00001-of-00002.parquet"],
               "test": ["n-test-00000-of-00001.parquet"]}},
    ),
    "numbered files of clients": (
        ["train_1.jsonl", "train_2.jsonl", "test_1.jsonl", "test_2.jsonl"],
        {name: {"train": [f"train_{name}.jsonl"], "test": [f"test_{name}.jsonl"]} for name in "12"},
    ),
    "numbered shards": (
        ["n-train-1.jsonl", "n-train-2.jsonl", "n-test.jsonl"],
        {"n": {"train": ["n-train-1.jsonl", "n-train-2.jsonl"], "test": ["n-test.jsonl"]}},
    ),
    "what Spark writes": (
        ["part-00000-3b7f-c000.snappy.parquet", "part-00001-3b7f-c000.snappy.parquet"],
        {None: {"train": ["part-00000-3b7f-c000.snappy.parquet", "part-00001-3b7f-c000.snappy.parquet"]}},
    ),
    "what `datasets` saves": (
        ["train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json", "dataset_dict.json"],
        {None: {"train": ["train/data-00000-of-00001.arrow"]}},
    ),
    "one name in two normal forms": (
        ["Zu\u0308rich-train.jsonl", "Z\u00fcrich-test.jsonl"],
        {"Z\u00fcrich": {"train": ["Zu\u0308rich-train.jsonl"], "test": ["Z\u00fcrich-test.jsonl"]}},
    ),
    "texts": (["n/1.txt", "n/2.txt", "s/1.txt"], {"n": {"train": ["n/1.txt", "n/2.txt"]}, "s": {"train": ["s/1.txt"]}}),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
def test_what_names_mean(what):
    names, meant = READ[what]
    assert told(*names) == meant
    assert told(*reversed(names)) == meant and not plan(names, "D").unused


@pytest.mark.parametrize(
    "names, message",
    [
        (["train-00000-of-00003.csv", "train-00002-of-00003.csv"], "lacks 1 of the 3 shards .*: 00001-of-00003; add"),
        (["train-00000-of-00001.csv", "train-00000-of-00002.csv", "train-00001-of-00002.csv"], "shards of two sets"),
        (["train.jsonl", "train-00000-of-00001.jsonl"], "both for train; keep one"),
        (["n.jsonl", "n.csv"], "holds n.csv and n.jsonl, both for train of 'n'"),
        (["train.jsonl", "validation.jsonl", "dev.jsonl"], "both for validation"),
        (
            ["train.jsonl", "n-test.jsonl"],
            "train.jsonl, of all clients, and n-test.jsonl, of one; .*columns.client=COL",
        ),
        (["n.jsonl", "test.jsonl"], "test.jsonl, of all clients, and n.jsonl, of one"),
        (["n.jsonl", "s/train.jsonl"], "n.jsonl and a folder of a client, s/train.jsonl"),
        (["test/a.jsonl", "n/train.jsonl"], "test/a.jsonl and a folder of a client"),
        (["test.jsonl"], "D has no train file beside test.jsonl"),
        (["train/n-test.jsonl"], "the folder of train/n-test.jsonl says train, its name test"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(names, message):
    with pytest.raises(UserError, match=message):
        plan(names, "D")


def test_a_column_of_clients_wins_over_names():
    assert told("2023.jsonl", "2024.jsonl", joined=True) == {None: {"train": ["2023.jsonl", "2024.jsonl"]}}
    assert told("n/train.jsonl", "s-test.csv", "x.jsonl", joined=True) == {
        None: {"train": ["x.jsonl", "n/train.jsonl"], "test": ["s-test.csv"]}
    }
    assert told("train.jsonl", "validation_matched.jsonl", joined=True) == {
        None: {"train": ["train.jsonl"], "validation": ["validation_matched.jsonl"]}
    }


def test_what_is_not_used_is_listed_and_what_nobody_means_is_not():
    silent = [".DS_Store", "Thumbs.db", "desktop.ini", "._n.jsonl", ".gitattributes", ".git/x", ".cache/a.jsonl",
              "__MACOSX/n.jsonl", "dataset_infos.json"]  # fmt: skip
    listed = [".s.jsonl", "README.md", "b/", "notes.docx", "x.txt"]
    found = plan([*silent, *listed, "n.jsonl"], "D")
    assert found.unused == tuple(listed) and len(found.parts) == 1
    assert plan(["train.jsonl", "extra.jsonl", "meta.csv"], "D").unused == ("extra.jsonl", "meta.csv")
    assert plan(["1.txt", "2.txt", "README.txt"], "D").unused == ("README.txt",)
    deep = "/".join(["f"] * (DEEPEST + 1)) + "/x.jsonl"
    assert plan([deep, "n.jsonl"], "D").unused == (deep,)
    assert plan(["README.md"], "D") == FolderLayout((), ("README.md",))


def test_whether_names_say_the_split():
    assert [part.named for part in plan(["n-train.jsonl", "s.jsonl"], "D").parts] == [True, False]


WORDS = ["train", "test", "dev", "n", "s", "north-west", "data", "default", "0", "1", "2023", "part-0", "x.y", "_u", ""]
NAME = st.builds(
    lambda folders, stem, more, suffix: "/".join([*filter(None, folders), (stem or "a") + more + suffix]),
    st.lists(st.sampled_from(WORDS), max_size=3),
    st.sampled_from(WORDS),
    st.sampled_from(["", "-train", "_test", ".val", "-00000-of-00001", "-train-00000-of-00002", "-2"]),
    st.sampled_from([".jsonl", ".CSV", ".parquet", ".json.gz", ".txt", ".md", ""]),
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(NAME, unique=True, max_size=8), st.booleans())
def test_each_file_is_used_once_or_listed_or_all_are_refused(names, joined):
    """And the order of the listing changes nothing."""
    try:
        found = plan(names, "D", joined=joined)
    except UserError as refused:
        assert "\n" not in str(refused)
        with pytest.raises(UserError):
            plan(names[::-1], "D", joined=joined)
        return
    used = [file for part in found.parts for file in part.files]
    assert sorted([*used, *found.unused]) == sorted(names)
    assert plan(names[::-1], "D", joined=joined) == found
    assert all(part.client is None for part in found.parts) or not joined
