"""`llm-fed publish` against a small stand-in of vLLM's routes, which keeps names and folders and answers for them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llm_fed import run as llm_fed_run
from llm_fed.basics.errors import RunError, UserError
from llm_fed.commands.publish import Publisher
from llm_fed.experiment import run as experiment
from llm_fed.settings import configfile


class StandIn(BaseHTTPRequestHandler):
    """A vLLM that loads what has an adapter's files."""

    loaded: dict[str, str]
    calls: list[str]
    fails = ""  # the end of a path that answers 500

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, code: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": name} for name in ("the-base", *self.loaded)]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, route = body.get("lora_name", body.get("model")), self.path.rpartition("/")[2]
        self.calls.append(f"{route} {name}")
        if self.fails and route == self.fails:
            return self.reply(500, {"error": "no room"})
        if route == "load_lora_adapter":
            if name in self.loaded or not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file():
                return self.reply(400, {"error": "has been loaded, or no such path"})
            self.loaded[name] = body["lora_path"]
        elif name not in self.loaded:
            return self.reply(404, {"error": f"no {name}"})
        elif route == "unload_lora_adapter":
            del self.loaded[name]
        self.reply(200, {})


@pytest.fixture
def vllm() -> Iterator[tuple[str, type[StandIn]]]:
    handler = type("Handler", (StandIn,), {"loaded": {}, "calls": [], "fails": ""})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def test_each_round_of_a_run_that_goes_on(small, vllm, tmp_path, llm_fed):
    """As a callback and as a command: new names are loaded and answer before old ones go."""
    url, handler = vllm
    run = tmp_path / "run"
    llm_fed_run(small.tree(rounds=2), out=run, callbacks=[Publisher(str(run), url, tmp_path / "out")])
    assert handler.loaded.keys() == {"ada@2", "bob@2", "cyd@2"}
    assert handler.calls[:6] == [f"{route} {client}@1" for route in ("load_lora_adapter", "completions")
                                 for client in ("ada", "bob", "cyd")]  # fmt: skip
    assert handler.calls.index("unload_lora_adapter ada@1") > handler.calls.index("completions cyd@2")
    before = list(handler.calls)
    said = llm_fed("publish", run, "--vllm", url, "--out", tmp_path / "out")
    assert said.code == 0 and said.out.split() == ["ada@2", "bob@2", "cyd@2"], said.err
    assert [call for call in handler.calls[len(before) :] if "load" in call] == []


def test_what_goes_wrong(small, vllm, tmp_path, llm_fed):
    url, handler = vllm
    for name, seed in (("run", 0), ("other", 1)):
        experiment.train(configfile.from_dict(small.tree(rounds=1, seed=seed)), tmp_path / name)
    handler.fails = "completions"
    said = llm_fed("publish", tmp_path / "run", "--vllm", url)
    assert said.code == 1 and "/v1/completions answers 500" in said.err and "no room" in said.err
    handler.fails = ""
    assert llm_fed("publish", tmp_path / "run", "--vllm", url).code == 0
    llm_fed("publish", tmp_path / "other", "--vllm", url).assert_refused("already serves another ada@1")
    with pytest.raises(RunError, match="cannot be reached"):
        Publisher(str(tmp_path / "run"), "http://127.0.0.1:9", tmp_path / "out").publish()
    with pytest.raises(UserError, match="is no address"):
        Publisher(str(tmp_path / "run"), "localhost", tmp_path / "out").publish()
