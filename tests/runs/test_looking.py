"""Looking at a run folder does not run the code that it names, unless the user allows the name."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import outside
import pytest
import yaml
from chat_forms import CHATML, form_for

import llm_fed as package
from llm_fed.basics import checksum
from llm_fed.kinds.language import load_base
from llm_fed.models import prompt
from llm_fed.settings import plugins
from llm_fed.settings.config import BaseConfig
from llm_fed.tasks.templates import template_of

NAME = "half:Half"
BOMB = "from pathlib import Path\nPath('exploded').touch()\n"


@pytest.fixture(scope="module")
def own_run(small, tmp_path_factory) -> Path:
    """A finished run of a method and a task in one's own folder."""
    place = tmp_path_factory.mktemp("own")
    outside.module(place, "half", outside.HALF)
    before = list(sys.path)
    sys.path.append(str(place))
    try:
        package.run(small.tree(rounds=1, method={"name": NAME}), out=place / "run")
    finally:
        sys.path[:] = before
        del sys.modules["half"]
    return place / "run"


@pytest.fixture
def strange(own_run, here) -> Path:
    """The folder at somebody else's, with code beside it that must not run."""
    outside.module(here, "half", BOMB + outside.HALF)
    return Path(shutil.copytree(own_run, here / "run"))


COMMANDS = [
    ["eval", "run"],
    ["eval", "run", "--cross"],
    ["audit", "run"],
    ["chat", "run"],
    ["export", "run", "copies"],
    ["export", "run", "models", "--merged"],
    ["push", "run", "lab"],
    ["join", "run", "--data", "run/metrics.jsonl", "--out", "new"],
    ["merge", "mean", "--fed", "run", "--local", "run", "--out", "merged"],
    ["compare", "--runs", "run", "run"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]) + words[-1])
def test_no_command_runs_what_a_folder_names(strange, llm_fed, words):
    llm_fed(*words).assert_refused("run/config.yaml names method.name='half:Half'", "--allow half:Half")
    assert not Path("exploded").exists() and os.getcwd() not in sys.path and "half" not in sys.modules


@pytest.mark.parametrize("place", [["task", "name"], ["task", "server", "name"], ["method", "name"]])
def test_every_place_that_names_code(strange, llm_fed, place):
    """A folder with another method is refused as well; what is allowed of it is this name alone."""
    tree = yaml.safe_load(checksum.uncommented((strange / "config.yaml").read_text()))
    section = tree
    for part in place[:-1]:
        section = section[part]
    section[place[-1]] = "bomb:TASK"
    tree["task"]["server"]["examples"] = 4
    (strange / "config.yaml").write_text(yaml.safe_dump(tree))
    outside.module(Path.cwd(), "bomb", BOMB)
    llm_fed("eval", strange, "--allow", NAME).assert_refused(f"{'.'.join(place)}='bomb:TASK'", "--allow bomb:TASK")
    assert not Path("exploded").exists()


@pytest.fixture
def of_a_stranger(finished, tmp_path) -> Path:
    """A run that brings a chat template."""
    folder = Path(shutil.copytree(finished, tmp_path / "theirs"))
    for path in folder.glob("adapters/*/prompt.json"):
        said = checksum.checked(json.loads(path.read_text()))
        del said["text"]
        said |= {"chat_template": "{% for a in range(9) %}{{ messages[0].content }}{% endfor %}", "date_string": ""}
        path.write_text(json.dumps(checksum.added(said)))
    return folder


TEMPLATE = "has a chat template that is not its base's, which is a program"


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "{}"],
        ["export", "{}", "models", "--merged"],
        ["eval", "--base", "BASE", "--adapter", "{}/adapters/ada", "--data", "DATA"],
        ["chat", "--base", "BASE", "--adapter", "{}/adapters/ada"],
    ],
    ids=str,
)  # fmt: skip
def test_no_template_of_a_stranger_runs(of_a_stranger, small, here, llm_fed, monkeypatch, words):
    places = {"BASE": str(small.base), "DATA": str(sorted(small.data.rglob("*.jsonl"))[0])}
    words = [places.get(word, word.format(of_a_stranger)) for word in words]
    monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n"))
    said = llm_fed(*words)
    assert said.code == 2 and TEMPLATE in said.err and "--allow prompt.json" in said.err
    assert llm_fed(*words, "--allow", "prompt.json").code == 0


def test_the_bases_own_template_needs_no_word(small, tmp_path):
    base = load_base(BaseConfig(name=str(small.base), dtype="float32"), "cpu")
    base.tokenizer.chat_template = form_for("with marks", CHATML).text
    template = template_of("chat", base.tokenizer)
    said = prompt.Prompt(template, (1,), 4)
    (tmp_path / prompt.FILE).write_bytes(said.as_json(base.tokenizer, base.source))
    assert prompt.prompt_for(base, tmp_path) == said
    base.tokenizer.chat_template = base.tokenizer.chat_template + " "
    with pytest.raises(plugins.NotAllowed, match=TEMPLATE):
        prompt.prompt_for(base, tmp_path)


def test_no_base_that_a_run_brings_along_is_loaded(finished, small, tmp_path, llm_fed):
    folder = Path(shutil.copytree(finished, tmp_path / "theirs"))
    shutil.copytree(small.base, folder / "own")
    tree = yaml.safe_load(checksum.uncommented((folder / "config.yaml").read_text()))
    tree["base"]["name"] = str(folder / "own")
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    llm_fed("eval", folder).assert_refused("brings along with its tokenizer", f"--allow {folder / 'own'}")
    assert llm_fed("eval", folder, "--allow", folder / "own").code == 0


def test_what_the_user_allows_runs(strange, llm_fed):
    """From the working directory, where no other module is looked for afterwards."""
    said = llm_fed("eval", strange, "--allow", NAME)
    assert said.code == 0 and "mean" in said.out, said
    assert Path("exploded").exists() and os.getcwd() not in sys.path
    assert llm_fed("audit", strange, "--sample", "1", "--allow", NAME).code == 0
    llm_fed("eval", strange, "--allow", "half:Other").assert_refused("--allow half:Half")
    llm_fed("eval", strange).assert_refused("--allow half:Half")  # one command's leave is none for the next


def test_from_python(strange):
    with pytest.raises(plugins.NotAllowed, match=r"allow=\['half:Half'\]"):
        package.open_run(strange)
    assert not Path("exploded").exists()
    run = package.open_run(strange, allow=[NAME])
    assert isinstance(run.chat("ada", "w20"), str)


def test_an_entry_point_of_an_installed_package_counts_as_allowed(strange, llm_fed, monkeypatch):
    """By its name, and by the path that a comparison writes instead; but none that lies where the folder lies."""
    outside.distribution(Path.cwd(), "lab-methods", "half-way = half:Half")
    monkeypatch.syspath_prepend(os.getcwd())
    llm_fed("eval", strange).assert_refused("--allow half:Half")
    site = Path.cwd() / "site"
    site.mkdir()
    shutil.move("lab_methods-1.0.dist-info", site)
    shutil.move("half.py", site)
    monkeypatch.syspath_prepend(str(site))
    assert llm_fed("eval", strange).code == 0


def test_a_run_in_a_strangers_folder_looks_nothing_up(strange, small, llm_fed):
    """The configuration is the user's own, and the folder's only differs from it."""
    config = small.config(Path("c.yaml"), rounds=1)
    llm_fed("run", config, "--out", strange).assert_refused("another configuration", "'half:Half' -> 'fedit'")
    Path("table").mkdir()
    shutil.copytree(strange, "table/fedit-seed0")
    llm_fed("compare", config, "--methods", "fedit", "--out", "table").assert_refused("another configuration")
    assert not Path("exploded").exists()


def test_ones_own_configuration_names_what_it_likes(strange, small, llm_fed):
    """Continued, compared and read from Python; what its file names needs no leave."""
    outside.module(Path.cwd(), "half", outside.HALF)
    config = small.config(Path("c.yaml"), rounds=1, method={"name": NAME})
    assert llm_fed("run", config, "--out", strange).code == 0
    assert llm_fed("run", config, "rounds=2", "--out", strange).code == 0
    assert llm_fed("compare", config, "--methods", f"fedit,{NAME}", "--out", "table").code == 0
