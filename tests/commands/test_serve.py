"""`llm-fed serve` as the openai package and a plain HTTP client see it, with the server in a thread."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from llm_fed import open_run
from llm_fed.basics.errors import UserError
from llm_fed.commands.serve import listening, program
from llm_fed.commands.serving import ModelServer, of_runs
from llm_fed.engine.continuous import RunningBatch
from llm_fed.experiment import run as experiment
from llm_fed.settings import configfile

KEY = "a secret"
JSON = {"Content-Type": "application/json"}
PROMPTS = [" ".join(f"w{20 + (n + i) % 9}" for i in range(1 + n % 5)) for n in range(25)]


@contextmanager
def served(server: ModelServer, key: str = "") -> Iterator[str]:
    """Its address."""
    found = listening("127.0.0.1", 0, key)
    running = program(server, key)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [found]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()
        found.close()


@pytest.fixture(scope="module")
def run(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    config = small.tree(checkpoint={"keep_rounds": [2]}, eval={"max_new_tokens": 12})
    experiment.train(configfile.from_dict(config), folder)
    return folder


@pytest.fixture(scope="module")
def server(run) -> Iterator[ModelServer]:
    found = of_runs([str(run), f"{run}@2"], 64)
    yield found
    found.close()


@pytest.fixture(scope="module")
def url(server) -> Iterator[str]:
    with served(server) as address:
        yield address


@pytest.fixture(scope="module")
def client(url) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, model: str, prompt: str, **options: object):
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], **options)


def test_models_are_clients_rounds_and_the_base(client, run):
    names = {"ada", "bob", "cyd"}
    assert {model.id for model in client.models.list()} == names | {f"{name}@2" for name in names} | {"base"}
    assert client.models.retrieve("ada@2").id == "ada@2"


def test_answers_are_those_of_chat_alone_and_all_at_once(client, run):
    """A hundred, each under its own adapter, one after another as `chat` writes them, and in one running batch."""
    asked = [(name, prompt) for name in ("ada", "bob", "cyd", "ada@2") for prompt in PROMPTS]
    clients = {"ada": open_run(run).model("ada"), "bob": open_run(run).model("bob"), "cyd": open_run(run).model("cyd")}
    alone = [chat(client, name, prompt).choices[0].message.content for name, prompt in asked]
    for (name, prompt), answer in zip(asked, alone, strict=True):
        if name in clients:
            assert answer == "".join(clients[name].reply(prompt)), (name, prompt)
    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(lambda pair: chat(client, *pair).choices[0].message.content, asked))
    assert together == alone and len(set(alone)) > 3


def test_a_stream_is_the_answer_in_pieces(client):
    whole = chat(client, "bob", "w20 w21", logprobs=True, top_logprobs=2)
    parts = list(chat(client, "bob", "w20 w21", stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content for part in parts if part.choices) == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage and whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    assert [part.choices[0].finish_reason for part in parts[:-1]][-1] == whole.choices[0].finish_reason
    first = whole.choices[0].logprobs.content[0]
    assert first.logprob == first.top_logprobs[0].logprob > first.top_logprobs[1].logprob
    told = chat(client, "bob", "w20 w21", stream=True, logprobs=True, top_logprobs=2)
    assert [each for part in told for each in part.choices[0].logprobs.content] == whole.choices[0].logprobs.content


def test_where_an_answer_ends(client):
    text = client.completions.create(model="base", prompt="w20 w21 w22", max_tokens=8)
    assert text.choices[0].finish_reason == "length" and text.usage.completion_tokens == 8
    whole = text.choices[0].text
    stop = whole.split()[3]
    cut = client.completions.create(model="base", prompt="w20 w21 w22", max_tokens=8, stop=[stop, "never"])
    assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    parts = client.completions.create(model="base", prompt="w20 w21 w22", max_tokens=8, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in parts) == cut.choices[0].text
    many = client.completions.create(model="base", prompt=["w20 w21 w22", "w23"], max_tokens=8, logprobs=2)
    assert [choice.index for choice in many.choices] == [0, 1] and many.choices[0].text == whole
    assert len(many.choices[0].logprobs.token_logprobs) == 8 and len(many.choices[0].logprobs.top_logprobs[0]) <= 2


def test_a_seed_decides_what_is_drawn(client):
    def drawn(seed: int, model: str = "ada") -> str:
        answered = chat(client, model, "w20", temperature=5, top_p=0.9, seed=seed, max_completion_tokens=12)
        return answered.choices[0].message.content

    assert drawn(1) == drawn(1) and len({drawn(seed) for seed in range(4)}) > 1
    with ThreadPoolExecutor(8) as pool:  # whatever is written beside it
        assert set(pool.map(lambda _: drawn(3), range(8))) == {drawn(3)}


CASES = [
    ({"model": "nobody"}, 404, ("'nobody'", "ada, bob, cyd")),
    ({"messages": [{"role": "user", "content": "w20 " * 300}]}, 400, ("300 tokens, and the context of", "is 64")),
    ({"messages": []}, 400, ("messages",)),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, ("role",)),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, ("content",)),
    ({"messages": [{"role": "assistant", "content": "x"}]}, 400, ("nothing to answer",)),
    ({"temperature": -1}, 400, ("temperature",)),
    ({"n": 3}, 400, ("n is not supported",)),
    ({"presence_penalty": 1}, 400, ("presence_penalty is not supported",)),
    ({"tools": [{"type": "function"}]}, 400, ("tools is not supported",)),
    ({"n": 1, "frequency_penalty": 0, "tools": [], "user": "u"}, 200, ()),
]


@pytest.mark.parametrize("changes, code, parts", CASES)
def test_what_is_wrong_is_said(url, changes, code, parts):
    body = {"model": "ada", "messages": [{"role": "user", "content": "w20"}], "max_tokens": 2}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body | changes, timeout=60)
    assert reply.status_code == code and all(part in reply.text for part in parts), reply.text


def test_broken_json_and_unknown_paths(url):
    reply = httpx.post(f"{url}/v1/chat/completions", content=b'{"model": "ada", ', headers=JSON, timeout=60)
    assert reply.status_code == 400 and "JSON" in reply.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/nothing", timeout=60).status_code == 404


def test_keys(server, capfd):
    with served(server, KEY) as address:
        assert httpx.get(f"{address}/v1/models", timeout=60).status_code == 401
        assert httpx.get(f"{address}/health", timeout=60).json()["status"] == "ok"
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"model": "ada", "prompt": "w20 w21 w29", "max_tokens": 2}
        assert httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    said = capfd.readouterr().err
    assert "GET /v1/models 401" in said and "POST /v1/completions 200" in said and "ada" in said
    assert "w29" not in said and KEY not in said


def test_a_full_queue_and_a_hang_up(run, monkeypatch):
    """Two rows and two that wait; what comes then is asked to come again. A stream that nobody reads any more frees its
    row, and one that is never read keeps nobody waiting."""
    stepped = RunningBatch.step
    monkeypatch.setattr(RunningBatch, "step", lambda batch: time.sleep(0.02) or stepped(batch))
    monkeypatch.setattr("llm_fed.commands.serving.most_rows", lambda *_: 2)
    server = of_runs([str(run)], 2)
    body = {"model": "ada", "prompt": "w20", "max_tokens": 100, "stream": True}
    with served(server) as address, httpx.Client(base_url=address, timeout=60) as http:

        def load() -> tuple[int, int]:
            now = http.get("/health").json()
            return now["running"], now["waiting"]

        def comes(*wanted: int) -> None:
            until = time.monotonic() + 60
            while load() != wanted:
                assert time.monotonic() < until, load()
                time.sleep(0.01)

        host, port = address.removeprefix("http://").split(":")
        silent = []
        for n in range(4):
            silent.append(socket.create_connection((host, int(port))))
            data = json.dumps(body | {"stop": ["never"]}).encode()
            silent[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                               + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)  # fmt: skip
            comes(min(n + 1, 2), max(0, n - 1))
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        for each in silent[:3]:
            each.close()
        comes(1, 0)
        assert http.post("/v1/completions", json={**body, "max_tokens": 2, "stream": False}).status_code == 200
        comes(0, 0)  # the fourth is written, though it was never read
        silent[3].close()
    server.close()


def test_a_whole_answer_that_nobody_waits_for_is_not_written_to_its_end(run, monkeypatch):
    """Tokens come faster than one looks for its client."""
    stepped, steps = RunningBatch.step, []
    monkeypatch.setattr(RunningBatch, "step", lambda batch: steps.append(time.sleep(0.1)) or stepped(batch))
    server = of_runs([str(run)], 2)
    body = json.dumps({"model": "ada", "prompt": "w20", "max_tokens": 63, "stop": ["never"]}).encode()
    with served(server) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)  # fmt: skip
            while not steps:
                time.sleep(0.01)
        while server.load["running"]:
            time.sleep(0.01)
    server.close()
    assert len(steps) < 50  # of 63, the model's context


def test_an_answer_that_cannot_be_computed_is_an_error(run, monkeypatch):
    server = of_runs([str(run)], 8)

    def fails(batch: RunningBatch, new: object) -> None:
        raise RuntimeError("out of memory")

    body = {"model": "ada", "prompt": "w20", "max_tokens": 2}
    with served(server) as address:
        with monkeypatch.context() as patch:
            patch.setattr(RunningBatch, "read", fails)
            reply = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 500
        assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200
        server.close()
        assert httpx.get(f"{address}/health", timeout=60).status_code == 503
        assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 503


@pytest.mark.parametrize("method", ["fedem", "pfedmoe", "feddpa", "fedalt"])
def test_mixtures_are_served(small, tmp_path, method):
    """Methods whose personal model is a router or a mixture answer as their own model does, beside one another."""
    config = small.tree(rounds=1, method={"name": method}, adapter={"dropout": 0.0}, eval={"max_new_tokens": 6})
    experiment.train(configfile.from_dict(config), tmp_path / "run")
    server = of_runs([str(tmp_path / "run")], 64)
    models = open_run(tmp_path / "run")
    with served(server) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        asked = [(name, prompt) for name in ("ada", "bob") for prompt in PROMPTS[:4]]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda pair: chat(client, *pair).choices[0].message.content, asked))
    server.close()
    assert found == ["".join(models.model(name).reply(prompt)) for name, prompt in asked]


def test_runs_that_cannot_be_served_together(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    lines = [line for line in (other / "config.yaml").read_text().splitlines() if not line.startswith("#")]
    (other / "config.yaml").write_text("\n".join(lines).replace("dtype: float32", "dtype: bfloat16"))
    with pytest.raises(UserError, match="two models are called 'ada'"):
        of_runs([str(run), str(other)], 8)
    with pytest.raises(UserError, match="the runs are of different bases; serve each on a port of its own"):
        of_runs([str(run), f"{other}@2"], 8)


def test_where_it_listens():
    with pytest.raises(UserError, match="--host 0.0.0.0 would answer anybody.*--api-key"):
        listening("0.0.0.0", 0, "")
    listening("0.0.0.0", 0, KEY).close()
    with (
        listening("127.0.0.1", 0, "") as first,
        pytest.raises(UserError, match="cannot listen at .*give another --port"),
    ):
        listening("127.0.0.1", first.getsockname()[1], "")
