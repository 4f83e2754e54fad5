"""Methods and tasks from outside: by their class or by an entry point, everywhere where a built-in one is named."""

import json
import subprocess
import sys
from pathlib import Path

import outside
import pytest
import yaml

from llm_fed import methods, tasks
from llm_fed.basics.errors import UserError
from llm_fed.methods.fedit import FedLoRA
from llm_fed.runs.records import read_records
from llm_fed.settings import plugins
from llm_fed.settings.config import ServerConfig, TaskConfig

NAME = "half:Half"


@pytest.fixture
def half(here) -> Path:
    outside.module(here, "half", outside.HALF)
    return here


@pytest.fixture
def installed(here, monkeypatch) -> Path:
    """A package with a method and a task, as pip would install it."""
    place = here / "site"
    place.mkdir()
    outside.module(place, "lab.half", outside.HALF)
    outside.module(place, "lab.next_word", outside.TASK)
    outside.distribution(place, "lab-methods", "half-way = lab.half:Half", "next = lab.next_word:TASK")
    monkeypatch.syspath_prepend(str(place))
    return place


def test_a_class_in_the_folder_in_which_one_is(half):
    """Built, checked and shortened as those of llm_fed; what is installed comes first on the path."""
    built = methods.build({"name": NAME, "part": 1, "decay": 0.1, "names": ["a"]})
    assert (built.part, built.decay, built.names, built.paper) == (1.0, 0.1, ("a",), "Half (Doe 2026)")
    assert methods.canonical({"name": NAME, "part": 0.5, "decay": None}) == {"name": NAME}
    assert sys.path[-1] == str(half)


def test_a_built_in_class_by_its_path_is_the_built_in_method():
    assert type(methods.build({"name": "llm_fed.methods.fedit:FedLoRA"})) is FedLoRA
    assert methods.canonical({"name": "llm_fed.methods:FedLoRA", "personal_share": 0.3}) == {
        "name": "fedlora", "personal_share": 0.3
    }  # fmt: skip


def test_an_entry_point_is_the_class_that_it_names(installed):
    assert type(methods.build({"name": "half-way"})) is methods.find("lab.half:Half")
    assert methods.canonical({"name": "half-way", "part": 0.25}) == {"name": "lab.half:Half", "part": 0.25}
    assert tasks.find("next") is tasks.find("lab.next_word:TASK")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"prt": 1}, ["unknown key method.prt (the closest is 'part'); known: part, decay, names"]),
        ({"num_models": 3}, ["method.num_models is a setting of", "fedmerge", "half:Half takes part, decay, names"]),
        ({"part": "much"}, ["method.part is 'much' (str); it takes float"]),
        ({"decay": "much"}, ["method.decay is 'much' (str); it takes None or float"]),
        ({"part": 0}, ["half:Half refuses its settings: part must be above 0 and at most 1"]),
    ],
)
def test_settings_are_checked_as_those_of_a_built_in_method(half, settings, parts):
    with pytest.raises(UserError) as refused:
        methods.build({"name": NAME, **settings})
    assert all(part in str(refused.value) for part in parts), refused.value


def test_a_setting_without_a_default_must_be_given(half):
    text = outside.HALF.replace("part: float = 0.5", "part: float").replace("decay: Optional[float] = None\n", "")
    outside.module(half, "open", text.replace("    names: tuple[str, ...] = ()\n", ""))
    with pytest.raises(UserError, match=r"method.part has no default in open:Half; give method.part=..."):
        methods.build({"name": "open:Half"})
    assert methods.canonical({"name": "open:Half", "part": 1}) == {"name": "open:Half", "part": 1.0}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("halff:Half", ["python finds no module halff (the closest is 'half'), neither in {here} nor", "install its"]),
        ("half.more:Half", ["python finds no module half.more"]),
        ("half:Haf", ["{here}/half.py has no 'Haf' (the closest is 'Half')"]),
        ("half:mean", ["half:mean' is <function mean", "derives from llm_fed.method.Method"]),
        ("half:UserError", ["is the class UserError; it must be a class that derives from llm_fed.method.Method"]),
        ("half.Half", ["'half.Half' is unknown", "and your own as package.module:Name"]),
        ("half-wy", ["'half-wy' is unknown", "known: local, pooled, fedit", "your own as package.module:Name"]),
        ("fedti", ["'fedti' is unknown (the closest is 'fedit')"]),
    ],
)
def test_a_name_that_nothing_has(half, name, parts):
    with pytest.raises(UserError) as refused:
        methods.build({"name": name})
    assert all(part.format(here=half) in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "import nowhere\n",
            "line 1 (import nowhere) fails when own is imported: ModuleNotFoundError: No module named",
        ),
        (
            "\nfrom llm_fed.merge import meen\n",
            "line 2 (from llm_fed.merge import meen) fails when own is imported: Imp",
        ),
        ("x = 1\nclass Own:\n    def f(:\n", "line 3 (def f(:) fails when own is imported: SyntaxError"),
        ("import json\njson.loads('{')\n", "line 2 (json.loads('{')) fails when own is imported: JSONDecodeError"),
        ("raise SystemExit(3)\n", "line 1 (raise SystemExit(3)) fails when own is imported: SystemExit: 3"),
        (
            outside.IMPORTS + "@dataclass\nclass Own(Method):\n    x: int = 0\n",
            "TypeError: cannot inherit non-frozen dataclass from a frozen one",
        ),
    ],
)
def test_a_mistake_in_the_module_is_shown_where_it_stands(here, text, part):
    """Its own line, not one within a library that it calls."""
    path = outside.module(here, "own", text)
    with pytest.raises(UserError) as refused:
        methods.build({"name": "own:Own"})
    assert f"method.name='own:Own': {path}, line " in str(refused.value) and part in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("class Own(Method):\n    x: int = 0\n", "Own is not a dataclass itself, so its settings are not read"),
        (
            "@dataclass(frozen=True)\nclass Own(Method):\n    x: list[int] = ()\n",
            "x is of the type list[int]; settings",
        ),
        (
            "def make():\n    @dataclass(frozen=True)\n    class Own(Method):\n        x: int = 0\n"
            "    return Own\nOwn = make()\n",
            "is not found as own:make.<locals>.Own; define it at the top level of its module",
        ),
    ],
)
def test_a_class_that_is_no_method(here, text, part):
    outside.module(here, "own", outside.IMPORTS + text)
    with pytest.raises(UserError, match=r"method.name='own:Own'") as refused:
        methods.build({"name": "own:Own"})
    assert part in str(refused.value), refused.value


def test_entry_points_that_fail_or_collide_are_listed_with_what_is_wrong(installed):
    """A built-in name stays what it is, and of two packages with one name none is taken silently."""
    outside.distribution(installed, "other", "half-way = other:Half\nfedit = lab.half:Half\nbroken = nowhere:Method")
    with pytest.raises(UserError, match="a name in several installed packages.*lab.half:Half .of lab-methods 1.0. or"):
        methods.build({"name": "half-way"})
    assert methods.canonical({"name": "fedit"}) == {"name": "fedit"}
    listed = methods.outside()
    wrong = {(row["name"], row["package"]): row["wrong"] for row in listed}
    assert wrong.keys() == {
        ("broken", "other 1.0"), ("fedit", "other 1.0"), ("half-way", "other 1.0"),
        ("half-way", "lab-methods 1.0"),
    }  # fmt: skip
    assert "python finds no module nowhere" in wrong["broken", "other 1.0"]
    assert wrong["fedit", "other 1.0"] == "fedit is built into llm_fed, so this one is found as lab.half:Half alone"


def test_methods_and_tasks_of_installed_packages_are_listed(installed, llm_fed):
    rows = json.loads(llm_fed("methods", "--json").out)
    assert rows[-1] == {
        "name": "half-way", "aliases": [], "paper": "Half (Doe 2026)",
        "settings": {"part": 0.5, "decay": None, "names": []}, "package": "lab-methods 1.0",
        "ranges": {},
    }  # fmt: skip
    assert json.loads(llm_fed("tasks", "--json").out)[-1] == {
        "name": "next", "metric": "exact_match", "clients": "3", "source": "made up", "package": "lab-methods 1.0"
    }  # fmt: skip
    said = llm_fed("methods").out
    assert "half-way\n  paper: Half (Doe 2026)\n  settings:\n    part=0.5\n    decay=None\n" in said


@pytest.mark.slow
def test_a_run_of_ones_own_method_from_its_folder(half, small, llm_fed):
    """The program is started by its name, which puts its own folder on the path and not the one where one is."""
    small.config(half / "mine.yaml", rounds=1)
    program = f"import sys; sys.path[0] = {sys.exec_prefix!r}; from llm_fed.cli import main; main(sys.argv[1:])"
    words = ["run", "mine.yaml", f"method={NAME}", "method.part=0.5"]
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    run = half / "runs" / "mine-Half-seed0"
    assert json.loads((run / "summary.json").read_text())["method"] == NAME
    card = (run / "adapters" / "ada" / "README.md").read_text()
    assert f"with the method `{NAME}` (Half (Doe 2026))" in card
    assert llm_fed("eval", run, "--allow", NAME, "--json").code == 0 and (run / "report.html").is_file()


def test_a_run_goes_on_under_the_names_with_which_it_began(installed, small, llm_fed):
    """Entry points of a method and a task; another setting is refused, and so is the class and path of the method."""
    section = {"method": {"name": "half-way", "part": 0.25}, "task": {"name": "next", "path": None}}
    config = small.config(installed.parent / "c.yaml", rounds=1, **section)
    out = ["--out", "run"]
    assert llm_fed("run", config, *out).code == 0
    assert llm_fed("run", config, "method=half-way", "method.part=0.25", "rounds=2", *out).code == 0
    rounds = [line["round"] for line in read_records(Path("run/metrics.jsonl")) if line["kind"] == "round"]
    assert rounds == [1, 2]
    for words, said in (
        (["method.part=0.5"], "method.part: 0.25 -> 0.5"),
        (["method=lab.half:Half", "method.part=0.25"], "method.name: 'half-way' -> 'lab.half:Half'"),
    ):
        llm_fed("run", config, *words, "rounds=2", *out).assert_refused("another configuration", said)


def test_a_flower_app_says_what_nodes_need(half, small, llm_fed):
    said = llm_fed("flower", small.config(half / "c.yaml", method={"name": NAME}))
    assert said.code == 0 and "wrote apps/c-Half" in said.out
    assert f'add allow="{NAME}" to --node-config' in said.out
    assert yaml.safe_load(Path("apps/c-Half/federation/config.yaml").read_text())["method"] == {"name": NAME}


def test_a_task_from_outside(here):
    """Partitioned, held out and given to the server as those of llm_fed; here its groups are chosen, too."""
    outside.module(here, "own", outside.TASK)
    data = tasks.load(TaskConfig("own:TASK", groups=("z", "x")), 0)
    assert {name: len(client.test) for name, client in data.clients.items()} == {"z": 4, "x": 4}
    server = ServerConfig(examples=4, name="own:TASK")
    data = tasks.load(TaskConfig("planted", server=server), 0)
    assert data.server and [example.prompt[0] for example in data.server.train] == ["w"] * 4
    with pytest.raises(UserError, match="text, images and labelled texts do not mix; name a task like own:TASK"):
        tasks.load(TaskConfig("own:TASK", server=ServerConfig(examples=4, name="images")), 0)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("own:load", "task.name='own:load' is <function load"),
        ("own:BAD", "its load returns [], not a TaskData"),
        ("own:TSK", "own.py has no 'TSK' (the closest is 'TASK')"),
        ("nxt", "task.name='nxt' is unknown"),
    ],
)
def test_a_name_that_is_no_task(here, name, part):
    outside.module(here, "own", outside.TASK + 'BAD = Task(lambda config, seed: [], "rouge1", "0", "nowhere")\n')
    with pytest.raises(UserError) as refused:
        tasks.load(TaskConfig(name), 0)
    assert part in str(refused.value), refused.value


def test_only_what_is_allowed_is_imported(installed):
    """An allowed name allows its other name, and nothing beside it; within `only`, built-in names need no leave."""
    for name in ("half-way", "lab.half:Half", "lab.half:Other"):
        with plugins.only(["next", "elsewhere:Method"]), pytest.raises(plugins.NotAllowed, match="has not allowed"):
            methods.build({"name": name})
    assert "lab.half" not in sys.modules
    with plugins.only(["half-way"]):
        assert methods.canonical({"name": "lab.half:Half"}) == {"name": "lab.half:Half"}
        assert methods.canonical({"name": "fedavg"}) == {"name": "fedit"}
        with pytest.raises(plugins.NotAllowed, match=r"task.name='next'.*allowed: half-way"):
            tasks.find("next")
    assert tasks.find("next").metric == "exact_match"
