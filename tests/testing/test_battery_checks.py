"""Each check of the battery fails on a method that lacks its property, and says what was got, expected and where."""

import textwrap

import outside
import pytest

from llm_fed.testing import battery
from llm_fed.testing.__main__ import main
from llm_fed.testing.battery import CHECKS, examine
from llm_fed.testing.federation import ADAPTERS, go

# What a method does wrong, by the check that finds it, and what this says. SEEN is a list of the module's own.
WRONG = {
    "every message survives the wire": (
        """
        async def finish(self, client, message):
            client.memory["seen"] = {1, 2}
        """,
        "TypeError: set cannot travel",
    ),
    "the server's step is pure": (
        """
        async def server_update(self, server, state, uploads):
            for upload in uploads:
                state.row.add_(upload.content.row / 3)
            return state
        """,
        "what server_update was given, after it differs: state.model.layers.0.self_attn.q_proj.lora_A has",
    ),
    "a round in which nothing arrives is a step, too": (
        """
        async def server_update(self, server, state, uploads):
            return state + mean([upload.content for upload in uploads], [1] * len(uploads))
        """,
        "own.py, line 19 (return state + mean(",
    ),
    "the order of uploads does not matter": (
        """
        async def server_update(self, server, state, uploads):
            return state + uploads[0].content if uploads else state
        """,
        "the state of uploads in reverse order differs by more than 1e-12: model.layers.0.self_attn.q_proj.lora_A has",
    ),
    "the order of clients does not matter": (
        """
        async def client_update(self, client, message):
            SEEN.append(client.id)
            factor = 1 + len(SEEN) % 3
            return factor * (await client.fit(message) - message)
        """,
        "the server's state differs by more than 1e-10: model.layers.0.self_attn.q_proj.lora_A has",
    ),
    "the same seed gives the same run, another seed another": (
        """
        async def client_update(self, client, message):
            theta = await client.fit(message)
            return theta - message + 0.01 * theta.like(torch.randn_like(theta.row))
        """,
        "the server's state differs: model.layers.0.self_attn.q_proj.lora_A has",
    ),
    "killed in every round but the first and continued is uninterrupted": (
        """
        async def server_update(self, server, state, uploads):
            SEEN.append(server.round)
            return state + 0.1 * len(SEEN) * uploads[0].content if uploads else state
        """,
        "the server's state differs: model.layers.0.self_attn.q_proj.lora_A has",
    ),
    "all clients at once is 1 at a time": (
        """
        async def client_update(self, client, message):
            SEEN[:] = [await client.fit(message)]
            again = await client.fit(message)
            return again - SEEN[0]
        """,
        "the server's state differs by more than 1e-10",
    ),
    "the loss falls": (
        """
        async def client_update(self, client, message):
            return 0.0 * (await client.fit(message) - message)
        """,
        "expected a fall by at least 0.3",
    ),
    "broadcast depends on its arguments alone": (
        """
        def broadcast(self, state, client):
            SEEN.append(client)
            return state * (1 + 1e-3 * len(SEEN))
        """,
        "what a new object sends c2, asked in another order differs",
    ),
    "personalize only computes": (
        """
        async def personalize(self, client, message):
            return await client.fit(message)
        """,
        "personalize trained, on",
    ),
    "personalize only computes, after finish, too": (
        """
        async def finish(self, client, message):
            client.memory["own"] = message

        async def personalize(self, client, message):
            client.memory["own"] = 2.0 * client.memory["own"] if "own" in client.memory else message
            return message
        """,
        "the memory of c0 after personalize differs: own.model.layers.0",
    ),
    "finish touches memory alone": (
        """
        async def finish(self, client, message):
            client.lr = 0.0
        """,
        "finish changed lr of c0",
    ),
    "bytes are those of the messages": (
        """
        from llm_fed.state.roles import Index
        sends = {"note": Index()}

        async def client_update(self, client, message):
            theta = await client.fit(message)
            return {"delta": theta - message, "note": 10 ** (3 * client.round)}

        def upload_like(self, message):
            return {"delta": message, "note": 10**15}

        async def server_update(self, server, state, uploads):
            return state + mean([upload.content["delta"] for upload in uploads], [1] * len(uploads))
        """,
        "expected equal sizes (or say --bytes-vary)",
    ),
    "uploads look as upload_like says": (
        """
        async def client_update(self, client, message):
            return (await client.fit(message) - message).select("lora_A")
        """,
        "c0: upload.entries has no model.layers.0.self_attn.q_proj.lora_B",
    ),
    "it says its paper, what it does, and defaults": ("paper = ''\n", "it has no paper; expected e.g. paper: ClassVar"),
}


def write(folder, body: str) -> None:
    text = outside.IMPORTS + "import torch\n\nSEEN = []\n\n\n@dataclass(frozen=True)\nclass Own(Method):\n"
    text += '    """One."""\n\n    paper: ClassVar[str] = "One (Doe 2026)"\n' + textwrap.indent(
        textwrap.dedent(body), "    "
    )
    outside.module(folder, "own", text)


def test_every_check_has_a_method_that_fails_it():
    """The others differ in how many clients are trained at once."""
    alike = {says for says in CHECKS if says.startswith("all clients at once")}
    assert CHECKS.keys() - alike <= WRONG.keys() <= CHECKS.keys()


@pytest.mark.parametrize("says", WRONG)
def test_a_check_fails_on_a_method_without_its_property(here, says):
    body, message = WRONG[says]
    write(here, body)
    settings = {"name": "own:Own"}
    whole = go(settings, ADAPTERS, here / "whole")
    with pytest.raises(Exception) as failed:  # noqa: B017  what the method raises, or Failed
        CHECKS[says](whole, here / "again")
    said = battery._explained(failed.value, settings)
    assert message in said, said


def test_a_step_that_remembers_in_the_method_is_not_pure(here):
    write(here, """
        async def server_update(self, server, state, uploads):
            object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
            return state
        """)  # fmt: skip
    with pytest.raises(battery.Failed, match="changed the method itself: it has {'steps': "):
        CHECKS["the server's step is pure"](go({"name": "own:Own"}, ADAPTERS, here / "whole"), here / "again")


def test_what_the_command_says(here, capsys, monkeypatch):
    """A line for each check, and where a property that fails is described; code 1."""
    monkeypatch.setattr(battery, "MODELS", ADAPTERS)
    write(here, WRONG["finish touches memory alone"][0])
    assert main(["own:Own"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = {line for line in lines if line.startswith("  FAIL")}
    assert failed == (
        "  FAIL  finish touches memory alone: finish changed lr of c0; see Method.finish: what it learns goes into "
        "client.memory"
    )
    assert sum(line.startswith("  ok    ") for line in lines) == 2 * len(CHECKS)


def test_a_method_that_does_not_run_is_shown_where_it_stops(here):
    write(here, "async def client_update(self, client, message):\n    return await client.fit(mesage)\n")
    lines: list[str] = []
    assert not examine({"name": "own:Own"}, say=lines.append)
    failed = [line for line in lines if "FAIL" in line]
    assert len(failed) == 2 and len(lines) == 4
    assert all(f"NameError: name 'mesage' is not defined ({here}/own.py, line 18 (return await" in x for x in failed)


def test_clients_train_as_a_method_asks_for(here, monkeypatch):
    monkeypatch.setattr(battery, "CHECKS", {})
    write(here, """
        def init(self, server):
            if server.local.optimizer != "sgd":
                raise UserError("set local.optimizer=sgd")
            return server.initial()
    """)  # fmt: skip
    lines: list[str] = []
    assert not examine({"name": "own:Own"}, say=lines.append)
    assert "  FAIL  it runs: set local.optimizer=sgd; see llm_fed/method/" in lines
    assert examine({"name": "own:Own"}, ["local.optimizer=sgd"], say=lines.append)


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (["own:Own", "x=1"], 2, ["llm_fed.testing: unknown key method.x"]),
        (["own:Own", "--bytes-vary", "0.1", "x=1"], 2, ["llm_fed.testing: unknown key method.x"]),
        (["own:Own", "x"], 2, ["got 'method.x' after the method"]),
        (["own:Own", "local.lr=0"], 2, ["local.lr is 0.0; it must be above 0"]),
        (["own:Own", "local.optimiser=sgd"], 2, ["unknown key local.optimiser (the closest is 'optimizer')"]),
        (["own:Onw"], 2, ["has no 'Onw' (the closest is 'Own')"]),
        (["potara"], 2, ["potara merges runs of fedit and local and has no rounds of its own"]),
    ],
)
def test_mistakes_of_a_user(here, capsys, words, code, parts):
    write(here, "")
    assert main(words) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and all(part in said.err for part in parts), said


def test_models_that_a_method_does_not_train_are_named(here, monkeypatch):
    """With why, and the others are tried all the same."""
    monkeypatch.setattr(battery, "CHECKS", {})
    write(here, 'adapters_only: ClassVar[bool] = True\nshared = "lora_A"\n')
    lines: list[str] = []
    assert examine({"name": "own:Own"}, say=lines.append)
    assert lines[:2] == ["adapters of a LLaMA:", "  ok    it runs"]
    assert "whole ResNets: not tried, as the method refuses them: own:Own trains, sends or merges parts of" in lines[2]
