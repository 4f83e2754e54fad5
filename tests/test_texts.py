"""Settings that are texts: whatever YAML would make of them, they are taken as they stand, and come back so."""

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm_fed import methods
from llm_fed.basics import documents
from llm_fed.basics.errors import UserError
from llm_fed.commands import section
from llm_fed.method import Method
from llm_fed.runs.reading import read_config
from llm_fed.settings import configfile, hints, is_text, members_of, paths, section_of
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, flat, is_reference, load

ODD = [
    "no", "11", "1e5", "0x10", "1_000", "12:30", "2024-01-01", "null", "~", "true", "011", "NULL", "yes", "off", "1.0",
    ".5", "-", "=", "<<", "*", "&a", "!x", "|", ">", "%", "@", "`", "#", "# a", "- a", "? a", "a: b", "yes: a", "{a}",
    "[a]", "[", "]", ",", "a,b", "a=b", "'", '"', "'a'", '"a"', "it's", "${x}", "${", "\\", "\\n", "a\nb", "\ta ", " a",
    "a ", "", "\u0141\u00f3d\u017a", "\U0001f600", "\u0085", "\u2028", "\ufeff", "\r\n", "\x7f",
]  # fmt: skip
SERVER = {"task": {"server": {"name": "files", "examples": 1}}}
BESIDE: dict[str, dict[str, Any]] = {"task.server.path": SERVER, "task.server.name": SERVER}
LETTERS = st.one_of(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12),
    st.text(string.punctuation + string.whitespace + "no1e", max_size=8),
    st.sampled_from(ODD),
)


@dataclass(frozen=True)
class Labelled(Method):
    """A method from outside with settings that are texts."""

    paper: ClassVar[str] = "none"
    label: str = ""
    note: str | None = None
    tags: tuple[str, ...] = ()
    scale: float = 1.0


METHOD = f"{Labelled.__module__}:Labelled"


@dataclass(frozen=True)
class Field:
    key: str
    is_list: bool
    nullable: bool

    def words(self, text: str) -> list[str]:
        beside = [f"{key}={value}" for key, value in flat(BESIDE.get(self.key, {})).items()]
        return [*beside, f"{self.key}={in_brackets([text]) if self.is_list else text}"]

    def tree(self, text: str) -> dict[str, Any]:
        value: Any = [text] if self.is_list else text
        tree: dict[str, Any] = {}
        *sections, last = self.key.split(".")
        place = tree
        for part in sections:
            place = place.setdefault(part, {})
        place[last] = value
        return configfile.merged(BESIDE.get(self.key, {}), tree)

    def of(self, config: Config) -> str:
        value = flat(as_dict(config))[self.key]
        return value[0] if self.is_list else value


def fields(kind: type, prefix: str = "") -> Iterator[Field]:
    for name, hint in hints(kind).items():
        key, kinds = f"{prefix}{name.removesuffix('_')}", [kind for kind, _ in members_of(hint)]
        if inner := section_of(hint):
            yield from fields(inner, f"{key}.")
        elif is_text(hint):
            yield Field(key, not any(kind is str for kind in kinds), type(None) in kinds)


FIELDS = [*fields(Config)]


def in_brackets(texts: list[str]) -> str:
    return "[" + ",".join("'" + text.replace("'", "''") + "'" for text in texts) + "]"


def fitting(field: Field, text: str) -> str:
    if field.key == "task.template":
        return text.replace("{prompt}", "") + "{prompt}"
    return text or "x" if field.key == "adapter.target_modules" else text


def test_the_text_fields_are_those_that_one_thinks_of():
    """So that the walk misses none: a new text setting is tried, too."""
    keys = {field.key for field in FIELDS}
    assert {"base.name", "task.template", "task.groups", "task.labels", "export.clients", "network.clients"} < keys
    assert {f"task.columns.{name}" for name in ("prompt", "input", "answer", "options", "client", "messages")} < keys
    assert not {"rounds", "device", "adapter.rank", "local.optimizer"} & keys


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("texts") / "c.yaml"


@settings(max_examples=120, deadline=None, derandomize=True)
@given(field=st.sampled_from(FIELDS), text=LETTERS)
def test_any_text_by_word(field, text):
    text = fitting(field, text)
    nothing = field.nullable and not field.is_list and text in documents.NULLS
    looked_up = field.key in paths.KEYS and ("${" in text or text == "???")
    if looked_up or (field.key == "task.template" and r"\n" in text):
        return
    found = field.of(load({}, field.words(text)))
    assert found == (None if nothing else text)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(field=st.sampled_from(FIELDS), text=LETTERS, unicode=st.booleans(), flow=st.booleans())
@example(Field("task.template", False, False), "#${prompt} {prompt}", True, True)
def test_any_text_in_a_file_and_in_nested_values(file, field, text, unicode, flow):
    """And from the file that a run saves."""
    text = fitting(field, text)
    if is_reference(field.key, text) or text == "???":
        return
    tree = field.tree(text)
    config = load(tree)
    assert field.of(config) == text
    written = yaml.safe_dump(tree, allow_unicode=unicode, default_flow_style=flow)
    file.write_text(written, encoding="utf-8", newline="")
    if "\u0085" not in written:  # PyYAML writes this letter so that it reads it as a space itself
        assert load(file) == config
    saved = documents.load(documents.dump(as_dict(config)))
    assert configfile.from_dict(saved) == config
    assert load(configfile.as_dict(config)) == config or "${" in text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(key=st.sampled_from(["label", "note", "tags"]), text=LETTERS)
def test_any_text_for_a_method_from_outside(file, key, text):
    """Its types are known from its class alone."""
    word = in_brackets([text]) if key == "tags" else text
    nothing = key == "note" and text in documents.NULLS
    expected: Any = (text,) if key == "tags" else None if nothing else text
    config = load({}, [f"method.name={METHOD}", f"method.{key}={word}", "method.scale=1e-3"])
    assert getattr(methods.build(config.method), key) == expected
    if is_reference(f"method.{key}", text) or text == "???":
        return
    tree = {"method": {"name": METHOD, key: [text] if key == "tags" else text, "scale": 1e-3}}
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    built = [methods.build(load(given).method) for given in (tree, file)]
    assert all(getattr(each, key) == ((text,) if key == "tags" else text) and each.scale == 1e-3 for each in built)


def test_no_method_of_llm_fed_has_a_setting_that_yaml_could_misread():
    """So a configuration of theirs is read without importing torch."""
    for kind in methods.BUILTIN.values():
        for key, hint in methods.fields_of(kind).items():
            assert not is_text(hint), (kind, key)
            kinds = [each for each, _ in members_of(hint) if get_origin(each) is Literal]
            choices = [choice for each in kinds for choice in get_args(each) if isinstance(choice, str)]
            assert all(documents.read(choice) == choice for choice in choices)


UNQUOTED = "no, 11, 1e5, 0x10, 1_000, 12:30, 2024-01-01, null, ~, true, 011, 1.0, 'z', \"q\", se"
MEANT = [part.strip().strip("'\"") for part in UNQUOTED.split(",")]


@pytest.mark.parametrize("place", ["task: {groups: [%s]}", "export: {clients: [%s]}", "network: {clients: [%s]}",
                                   "task: {labels: [%s]}", "base: {clients: [%s]}", "track: {with: [%s]}"])  # fmt: skip
def test_in_a_file_the_spelling_counts(file, place):
    file.write_text(place % UNQUOTED)
    key, kind = place.partition(": {")[0], place.partition("{")[2].partition(":")[0]
    assert flat(as_dict(load(file)))[f"{key}.{kind}"] == MEANT


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("task: {columns: {prompt: no, answer: 1, input: ~, client: 1e5}}", "task.columns.prompt", "no"),
        ("task: {columns: {prompt: no, answer: 1, input: ~, client: 1e5}}", "task.columns.answer", "1"),
        ("task: {columns: {prompt: no, answer: 1, input: ~, client: 1e5}}", "task.columns.input", None),
        ("task: {columns: {prompt: no, answer: 1, input: ~, client: 1e5}}", "task.columns.client", "1e5"),
        ("base: {name: 123, revision: 1e5}", "base.revision", "1e5"),
        ("adapter: {rank: {no: 2}}", "adapter.rank.no", 2),
        ("adapter: {rank: {11: 2, 1e5: 3, null: 4}}", "adapter.rank.1e5", 3),
        ("adapter: {rank: {11: 2, 1e5: 3, null: 4}}", "adapter.rank.null", 4),
        ("task: {groups: [&n north, *n]}", "task.groups", ["north", "north"]),
        ("network: {clients: 8}", "network.clients", 8),
        ("adapter: {target_modules: [1, q]}", "adapter.target_modules", ["1", "q"]),
        ("local: {lr: 1.0e-4, clip: 1e5}", "local.clip", 100000.0),
        ("local: {<<: {lr: 1.0, steps: 3}, lr: 2.0}", "local.lr", 2.0),
        ("local: {<<: [{steps: 3}, {steps: 4}], lr: 2.0}", "local.steps", 3),
        ("task: {template: '${amount} {prompt}'}", "task.template", "${amount} {prompt}"),
        ("rounds: 3\ntask: {template: '${rounds} {prompt}'}", "task.template", "3 {prompt}"),
    ],
)
def test_what_stands_there_is_meant(file, text, key, value):
    file.write_text(text)
    assert flat(as_dict(load(file)))[key] == value


@pytest.mark.parametrize(
    "word, key, value",
    [
        ("task.template=Q {prompt}\\nA ", "task.template", "Q {prompt}\nA "),
        ("task.template=\\\\nu {prompt}\\t", "task.template", "\\nu {prompt}\\t"),
        ("task.template=${x} {prompt}", "task.template", "${x} {prompt}"),
        ("task.groups=[no,11,1e5,0x10,12:30,null,~,true,011,b=c,*,&y,!z, #x ,a: b,${seed}]", "task.groups",
         ["no", "11", "1e5", "0x10", "12:30", "null", "~", "true", "011", "b=c", "*", "&y", "!z", "#x", "a: b",
          "${seed}"]),
        ("task.groups=['a,b',\"c,d\",e[1,2],f]", "task.groups", ["a,b", "c,d", "e[1,2]", "f"]),
        ("task.template={prompt}", "task.template", "{prompt}"),
        ("task.groups=[]", "task.groups", []),
        ("task.groups=null", "task.groups", None),
        ("task.columns.prompt=~", "task.columns.prompt", None),
        ("adapter.rank={11: 2, no: 3}", "adapter.rank.no", 3),
        ("adapter.rank={st.john: 3}", "adapter.rank.st.john", 3),
        ("adapter.rank.st.john=3", "adapter.rank.st.john", 3),
        ("export.clients=[all]", "export.clients", ["all"]),
        ("export.clients=all", "export.clients", "all"),
        ("adapter.target_modules=[qv]_proj", "adapter.target_modules", "[qv]_proj"),
        ("adapter.target_modules=[q,v]", "adapter.target_modules", ["q", "v"]),
        ("base.quantization='nf4'", "base.quantization", "nf4"),
        ("base.quantization=null", "base.quantization", None),
        ("local.steps=${rounds}", "local.steps", 7),
        ("clients_per_pass=auto", "clients_per_pass", "auto"),
        ("local={lr: 1e-4}", "local.lr", 1e-4),
    ],
)  # fmt: skip
def test_what_a_word_says(word, key, value):
    beside = ["method=hetlora"] if "rank" in word else []
    assert flat(as_dict(load({"rounds": 7}, [*beside, word])))[key] == value


def test_numbers_of_a_program_may_be_names():
    tree = {"task": {"groups": [11, 12], "columns": {"prompt": 1}}, "adapter": {"rank": {11: 2}}}
    config = load(tree)
    assert config.task.groups == ("11", "12") and config.task.columns.prompt == "1"
    assert config.adapter is not None and config.adapter.rank == {"11": 2}
    for wrong in (False, 1.5):
        with pytest.raises(UserError, match="task.groups is"):
            load({"task": {"groups": [wrong]}})
    with pytest.raises(UserError, match="YAML cannot express"):
        load({"task": {"groups": [b"x"]}})


@pytest.mark.parametrize(
    "text, line, parts",
    [
        ("rounds: 1\ntask:\n  template: Q: {prompt}", 3, ["put a text in quotes"]),
        ("task:\n  template: {prompt} A", 2, ["put a text in quotes"]),
        ("task:\n  template: * {prompt}", 2, ["put a text in quotes"]),
        ("task:\n  template: !x {prompt}", 2, ["the tag !x has no meaning here", "in quotes"]),
        ("task:\n  groups: [*]", 2, ["put a text in quotes"]),
        ("rounds: 1\nrounds: 2", 2, ["rounds is there twice"]),
        ("local: !!python/tuple [1]", 1, ["python/tuple"]),
        ("[1, 2]: 3", 1, ["a key is"]),
    ],
)
def test_what_cannot_be_read_says_where_and_how(file, text, line, parts):
    file.write_text(text)
    with pytest.raises(UserError, match=f"line {line}: ") as refused:
        load(file)
    assert all(part in str(refused.value) for part in parts) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "word, said",
    [
        ("task.groups=no", r"task.groups is 'no' \(str\); .*as in \[a,b\]"),
        ("task.groups=[a],b]", r"task.groups is '\[a\],b\]' .*in quotes"),
        ("task.groups=[a,,b]", r"task.groups is '\[a,,b\]' .*in quotes"),
        ("local.decay=no", "local.decay='no' is unknown"),
        ("adapter.target_modules=[]", "it must be at least one module name"),
        ("task.template=\udc80 {prompt}", "not UTF-8"),
        ("task.path=${oc.env:ABSENT}", "task.path: ABSENT is not an existing path"),
    ],
)
def test_what_a_word_cannot_say(word, said):
    with pytest.raises(UserError, match=said):
        load({}, [word])


ROWS = """
compare:
  seeds: [0]
  rows:
    no: [method=local]
    11: [method=fedit, adapter.rank=4]
    fedit, twice:
      - method=fedit
      - 'task.template=Question: {prompt}'  # the second one
"""


def test_rows_of_a_comparison(file):
    file.write_text(ROWS)
    rows = section.read_rows(file, [], [], [])
    assert list(rows.rows) == ["no", "11", "fedit, twice"]
    assert rows.cells["fedit, twice", 0].task.template == "Question: {prompt}"
    chosen = section.read_rows(file, [], documents.names_of("--methods", "no, 'fedit, twice',"), [])
    assert list(chosen.rows) == ["no", "fedit, twice"]


def test_odd_names_through_a_run_and_back(small, llm_fed, tmp_path):
    """Clients, a column and a template of which YAML would make something else."""
    clients, rows = ["no", "11", "1e5", "null", "12:30", "011"], []
    for number, client in enumerate([*clients, "~", "left out"]):
        rows += [{"1": f"w{20 + i} w{number}", "yes": "w4", "client": client} for i in range(6)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small.config(tmp_path / "c.yaml", rounds=1)
    said = llm_fed(
        "run", config, f"task.path={tmp_path / 'd.jsonl'}", f"task.groups=[{','.join(clients)},~]", "method=hetlora",
        "task.columns.client=client", "task.columns.prompt=1", "task.columns.answer=yes", "task.partition.test=0.5",
        "task.template=w5: {prompt}\\n", f"export.clients=[{','.join(clients)},~]",
        f"adapter.rank={{{', '.join(f'{client}: 2' for client in clients)}, ~: 1}}", "--out", tmp_path / "run",
    )  # fmt: skip
    assert said.code == 0, said.err
    saved = read_config(tmp_path / "run")
    assert saved.task.groups == (*clients, "~") and saved.task.template == "w5: {prompt}\n"
    assert saved.task.columns.prompt == "1" and saved.export.clients == saved.task.groups
    assert sorted(path.name for path in (tmp_path / "run/adapters").iterdir()) == sorted(saved.task.groups)
    again = llm_fed("run", tmp_path / "run/config.yaml", "--out", tmp_path / "run")
    assert again.code == 0 and "is complete" in again.err
    scored = llm_fed("eval", tmp_path / "run", "--json")
    assert scored.code == 0 and tuple(json.loads(scored.out)["clients"]) == saved.task.groups


def test_a_reference_into_a_list_without_references(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rounds: ${checkpoint.keep_rounds[1]}\ncheckpoint: {keep_rounds: [2, 3]}\n")
    config = configfile.load(path, [])
    assert (config.rounds, config.checkpoint.keep_rounds) == (3, (2, 3))
