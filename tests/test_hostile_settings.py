"""Settings that somebody else wrote: whatever they hold, they are refused in one line, and read no secret."""

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_fed.basics.errors import UserError
from llm_fed.settings import configfile
from llm_fed.settings.config import Config

ONCE_FELL = {
    "not UTF-8": (b"rounds: 3 # \xff", []),
    "brackets": (b"a: " + b"[" * 5000 + b"]" * 5000, []),
    "braces": (b"{a: " * 300 + b"1" + b"}" * 300, []),
    "5,000 digits": (b"seed: " + b"9" * 5000, []),
    "5,000 digits in a word": (b"", ["seed=" + "9" * 5000]),
    "an open bracket": (b"", ["[=x"]),
    "a list for a section": (b"", ["base=- 1"]),
    "a surrogate": (b"", ["base.name=\udc80"]),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("settings") / "mine.yaml"


@pytest.mark.parametrize("what", ONCE_FELL)
def test_what_once_was_a_traceback_is_one_line(file, what):
    text, words = ONCE_FELL[what]
    file.write_bytes(text)
    with pytest.raises(UserError) as refused:
        configfile.load(file, words)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 6000


def test_the_environment_gives_paths_and_no_secrets(file, tmp_path, monkeypatch):
    """Neither the run folder nor the message has the value."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("DATA", str(tmp_path))
    for text in ("base: {name: '${oc.env:HF_TOKEN}'}", "task: {path: '${oc.env:HF_TOKEN,null}'}"):
        file.write_text(text)
        with pytest.raises(UserError, match="HF_TOKEN is not an existing path") as refused:
            configfile.load(file)
        assert "hf_abcdef" not in str(refused.value)
    for text, path in (("DATA", str(tmp_path)), ("ABSENT,null", None), ("ABSENT,/data", "/data")):
        file.write_text(f"task: {{path: '${{oc.env:{text}}}'}}")
        assert configfile.load(file).task.path == path
    file.write_text("task: {path: '${oc.env:ABSENT}'}")
    with pytest.raises(UserError, match="ABSENT is not an existing path"):
        configfile.load(file)


KEYS = sorted(configfile.flat(configfile.as_dict(Config())))
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2))
TREES = st.recursive(VALUES, lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=2), max_leaves=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), value=TREES, word=st.text(max_size=12))
def test_settings_of_any_kind_are_taken_or_refused(file, seed, value, word):
    draw = random.Random(seed)
    tree = configfile.as_dict(Config())
    *sections, last = draw.choice(KEYS).split(".")
    place = tree
    for section in sections:
        place = place[section]
    place[last] = value
    file.write_text(yaml.safe_dump(tree, allow_unicode=False), errors="replace")
    for words in ([], [f"{draw.choice(KEYS)}={word}"], [word]):
        try:
            configfile.load(file, words)
        except UserError as refused:
            assert str(refused)
