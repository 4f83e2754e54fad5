"""The blocks of code in the pages: each is run on a tiny federation, or stands in docs/not_run.yaml with the reason.

Whether run or not, a command of llm_fed is one that its command line takes, with settings that the configuration takes;
Python compiles, YAML is a configuration, and JSON can be read.
"""

import ast
import contextlib
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import doc_commands
import every
import outside
import pytest
import yaml
from click import MissingParameter
from doc_commands import BLOCKS, Command, doc_blocks

import llm_fed
from llm_fed import tasks
from llm_fed.commands import init
from llm_fed.commands.quickstart import ASSETS
from llm_fed.settings import configfile
from llm_fed.settings.config import TaskConfig

BASE = str(ASSETS / "tiny-base")
SCRIPTS = sorted(path.relative_to(outside.ROOT).as_posix() for path in outside.ROOT.glob("scripts/**/*.py"))
LANGUAGES = {"bash", "python", "yaml", "json", "csv", "toml", ""}
RUN = [block for block in BLOCKS if block.language in ("bash", "python") and doc_blocks.reason(block) is None]
LONG = ("llm-fed compare", "llm-fed merge", "llm_fed.compare", "llm_fed.testing", "timeit", "keys.py")
SHORTER = {  # what is too large for a test, by what is given in its place; of Python and of commands
    '"rounds=20"': '"rounds=1", "local.steps=1", "eval.max_new_tokens=2", "task.template=plain"',
    "Qwen/Qwen3-0.6B": BASE,
    "meta-llama/Meta-Llama-3-8B": BASE,
    "--draws 10": "--draws 2",
    "--methods local,fedit,fedmerge": "--methods local,fedit",
    "runs/fedit@50": "runs/fedit@1",
    "@20": "@1",
    '{"rounds": 9}': '{"rounds": 1, "local": {"steps": 1}, "eval": {"max_new_tokens": 2}}',
    "draws=10": "draws=2",
    'llm_fed.compare(config,': 'llm_fed.compare(config, "rounds=1", "local.steps=1", "eval.limit=2",',
}  # fmt: skip
BESIDE = {  # what a block needs that the page has said in words, or before
    "README.md": outside.IMPORTS + "import pandas as pd\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    f"model = AutoModelForCausalLM.from_pretrained({BASE!r})\ntokenizer = AutoTokenizer.from_pretrained({BASE!r})\n"
    "rows = [{'question': f'Which ward for a wound {n}?', 'answer': f'Ward {n % 2}.'} for n in range(12)]\n"
    "frame = pd.DataFrame(rows)\n\n",
    "docs/serving.md": "import json\n\nimport httpx\nimport peft\nimport transformers\n\n",
}


def name(block) -> str:
    return f"{block.page}:{block.line}"


def of(language: str) -> list[doc_blocks.Block]:
    return [block for block in BLOCKS if block.language == language]


def test_every_block_says_its_language():
    assert len(BLOCKS) > 60 and {block.language for block in BLOCKS} <= LANGUAGES


def test_what_is_listed_as_not_run_is_there_once():
    for page, listed in doc_blocks.not_run().items():
        codes = [block.code.lstrip() for block in BLOCKS if block.page == page]
        for start, why in listed.items():
            assert sum(code.startswith(start) for code in codes) == 1, f"{page}: {start}"
            assert 5 < len(why) < 80 and '"' not in why, why


def has_commands_such_as_llm_fed_takes(block: doc_blocks.Block) -> None:
    commands = doc_commands.commands(block.code)
    assert commands
    for command in commands:
        doc_commands.check(command)


def test_commands_are_such_as_llm_fed_takes():
    every.passes(of("bash"), has_commands_such_as_llm_fed_takes, name)


def test_commands_in_sentences_are_such_as_llm_fed_takes():
    found = []
    for page in doc_commands.PAGES:
        prose = re.sub(r"^```.*?^```$", "", (outside.ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        spans = [*re.findall(r"`(llm-fed [^`]+)`", prose), *re.findall(r"^    (llm-fed .+)$", prose, re.MULTILINE)]
        found += [(page, " ".join(span.split())) for span in spans]
    assert len(found) > 40
    for page, text in found:
        if text.startswith("llm-fed -"):  # of the program, as --help
            continue
        (command,) = doc_commands.commands(re.sub(r"\S+=\.\.\.", "", text))
        with contextlib.suppress(MissingParameter):  # a sentence may name a command without all that it needs
            assert doc_commands.check(command), f"{page}: {text}"


def takes_the_commands_of_its_docstring(script: str) -> None:
    """With all the options that stand in brackets."""
    text = ast.get_docstring(ast.parse((outside.ROOT / script).read_text())) or ""
    lines = re.findall(rf"^ *((?:\S+=\S+ |nice \S+ \S+ )*python {script}(?:.*\\\n)*.*)$", text, re.MULTILINE)
    code = re.sub(r"(--[\w-]+) \.\.\.", r"\1 VALUE", "\n".join(lines))
    for command in doc_commands.commands(re.sub(r"[\[\]]|\.\.\.", "", code)):
        assert doc_commands.check(command)


def test_scripts_take_the_commands_of_their_docstrings():
    every.passes(SCRIPTS, takes_the_commands_of_its_docstring)


@pytest.mark.parametrize("block", of("python"), ids=name)
def test_python_compiles_and_what_it_imports_is_there(block):
    for line in re.findall(r"^from (llm_fed[\w.]*) import (.+)$", block.code, re.MULTILINE):
        module = importlib.import_module(line[0])
        assert all(hasattr(module, each.strip()) for each in line[1].split(",")), line
    compile(block.code, name(block), "exec")


def is_a_configuration(block: doc_blocks.Block) -> None:
    tree = yaml.safe_load(block.code)
    assert tree and configfile.load(tree)


def is_json(block: doc_blocks.Block) -> None:
    text = block.code.strip()
    rows = [json.loads(text)] if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    assert rows and all(rows)


def test_yaml_is_a_configuration():
    every.passes(of("yaml"), is_a_configuration, name)


def test_json_can_be_read():
    every.passes(of("json"), is_json, name)


def test_the_files_of_the_page_on_data_are_read(tmp_path):
    """Each is written under the name that the sentence before it gives, with its rows twice, as one row makes no test
    split."""
    text = (outside.ROOT / "docs/data.md").read_text()
    part = text[text.index("## A file of each form") :]
    named = re.findall(r"here `([\w./]+)`.*?```\w+\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    assert len(named) == 6
    for path, code in named:
        rows = json.loads(code) if code.startswith("[") else []
        first, *others = code.splitlines(keepends=True)
        twice = json.dumps(rows * 2) if rows else first + "".join(others) * 2 if path.endswith(".csv") else code * 2
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(twice)
        whole = tmp_path / path.partition("/")[0]
        data = tasks.load(TaskConfig("files", path=str(whole), template="plain"), 0)
        assert set(data.clients) <= {"north", "south"} and all(len(client.train) for client in data.clients.values())


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Path:
    """A folder as the pages speak of it: data, configurations, a method, and a finished run of `fedit` and `local`."""
    folder = tmp_path_factory.mktemp("stage")
    rows = [{"question": f"Which ward for a wound {n}?", "reply": f"Ward {n % 2}."} for n in range(12)]
    (folder / "clinics").mkdir()
    for client in ("north", "south"):
        (folder / f"clinics/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"{row['question']},{row['reply']},{client}\n" for row in rows for client in ("north", "south")]
    (folder / "all.csv").write_text("question,reply,hospital\n" + "".join(lines))
    (folder / "mine.jsonl").write_text((folder / "clinics/north.jsonl").read_text().replace("reply", "answer"))
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree()))
    lines = [f"{row},{draw},ada,{50 + draw * (row == 'b')}" for row in "ab" for draw in range(3)]
    (folder / "scores.csv").write_text("\n".join(["row,draw,client,score", *lines]))
    outside.module(folder, "fedavgm", outside.printed('"""FedAvgM'))
    outside.module(folder, "by_loss", outside.printed('"""By loss'))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for method in ("fedit", "local"):
            llm_fed.run("mine.yaml", f"method={method}", out=f"of-{method}")
    return folder


@pytest.fixture
def scene(here, stage, monkeypatch) -> Path:
    """A copy of the stage, in which one is."""
    shutil.copytree(stage, here, dirs_exist_ok=True)
    (here / "scripts").symlink_to(outside.ROOT / "scripts")
    (here / "docs/results").mkdir(parents=True, exist_ok=True)
    (here / "docs/results/rows").symlink_to(outside.ROOT / "docs/results/rows")  # kept.py reads them
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(init, "BASE", BASE)  # where a command names none
    return here


def tree(**changes) -> dict:
    """A configuration that trains in a second."""
    columns = {"prompt": "question", "answer": "reply"}
    return {
        "rounds": 1,
        "base": {"name": BASE, "dtype": "float32"},
        "task": {"name": "files", "path": "clinics", "template": "plain", "columns": columns, "validation": 0.2},
        "method": {"name": "fedit"},
        "local": {"steps": 1, "batch_size": 2},
        "eval": {"limit": 2, "max_new_tokens": 2},
        "checkpoint": {"keep_rounds": [1]},
        "device": "cpu",
    } | changes


def shortened(text: str) -> str:
    for words, others in SHORTER.items():
        text = text.replace(words, others)
    return text


def prepare(scene: Path, code: str) -> None:
    """The configurations, runs and adapters that a block names and does not write itself."""
    written = set(re.findall(r"(?:--out |out=\")([\w/-]+)", code))
    if "llm-fed init" not in code:
        shutil.copy(scene / "mine.yaml", scene / "clinics.yaml")
    for run in sorted(set(re.findall(r"\bruns/[\w-]+", code)) - written):
        method = "local" if "local" in run or run.startswith("runs/b-") else "fedit"
        seed = re.search(r"seed(\d)$", run)
        if seed:
            llm_fed.run("mine.yaml", f"method={method}", f"seed={seed[1]}", out=run)
        else:
            shutil.copytree(scene / f"of-{method}", scene / run)
    for adapter in sorted(set(re.findall(r"adapters/\w+|out/(?:north|south|east)|my-\w+-adapter", code)) - written):
        method = "local" if "local" in adapter else "fedit"
        shutil.copytree(scene / f"of-{method}/adapters/north", scene / adapter, dirs_exist_ok=True)


def given(block):
    """What trains long, and what stands in the logs of results, which users do not read, is run by `make long`."""
    long = any(word in block.code for word in LONG) or block.page.startswith("docs/results/log/")
    return pytest.param(block, id=name(block), marks=[pytest.mark.slow] if long else [])


@pytest.fixture
def call(llm_fed):
    """The command line, under another name than the package's."""
    return llm_fed


@pytest.mark.parametrize("block", [given(block) for block in RUN if block.language == "bash"])
def test_a_block_of_commands_runs(block, scene, call, monkeypatch):
    code = shortened(block.code)
    prepare(scene, code)
    for command in doc_commands.commands(code):
        run(command, call, monkeypatch)


def run(command: Command, call, monkeypatch) -> None:
    words = command.words
    if words[0] != "llm-fed":
        words = [sys.executable if words[0] == "python" else words[0], *words[1:]]
        ended = subprocess.run(words, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return
    typed = " ".join(command.piped.words[1:]) if command.piped else "Which ward?\n/quit"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed + "\n"))
    said = call(*words[1:])
    assert said.code == 0, said.err
    if words[1] == "init":  # what it writes trains for minutes
        for path in (Path("clinics.yaml"), Path("all.yaml")):
            if path.exists() and "Qwen" not in path.read_text():
                found = yaml.safe_load(path.read_text())
                path.write_text(yaml.safe_dump(found | {"rounds": 1, "local": {"steps": 1}, "eval": tree()["eval"]}))


@pytest.mark.parametrize("block", [given(block) for block in RUN if block.language == "python"])
def test_a_block_of_python_runs(block, scene):
    code = shortened(block.code)
    prepare(scene, code)
    path = outside.module(scene, f"block_{block.line}", BESIDE.get(block.page, "") + code)
    importlib.invalidate_caches()
    importlib.import_module(path.stem)
