"""An HTTP server that the `openai` package and chat front ends speak to, with each client of a run as a model."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm_fed.basics.errors import RunError, UserError, one_line, printable
from llm_fed.commands.serving import Busy, ModelServer, Wanted
from llm_fed.engine.continuous import LiveAnswer, Sampling
from llm_fed.export.personal import Conversation, Personal
from llm_fed.tasks.control import THINK

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCH = 0.5  # seconds between two looks whether a client that waits for a whole answer is still there
# Values of a setting that ask for nothing, as front ends send them.
NOTHING: tuple[JsonValue, ...] = (None, 0, False, "", [], {}, "auto", "none", {"type": "text"})
ONE = ("n", "best_of", "repetition_penalty", "parallel_tool_calls")  # which ask for nothing by 1, or true


class _Body(BaseModel):
    """What both routes take. Other settings of OpenAI's are refused unless they ask for nothing."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, JsonValue] | None = None
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None

    @property
    def stops(self) -> list[str]:
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    def wanted(self, likeliest: int | None, most: int | None = None) -> Wanted:
        """UserError where it asks for what is not there."""
        for key, value in (self.model_extra or {}).items():
            if value not in NOTHING and not (key in ONE and value == 1):
                raise UserError(f"{key} is not supported here; leave it out")
        drawn = Sampling(self.temperature, self.top_p or 1.0, self.seed) if self.temperature else None
        return Wanted(most or self.max_tokens, drawn, likeliest)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatTurn(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]


class ChatBody(_Body):
    """Of /v1/chat/completions."""

    messages: list[ChatTurn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def turns(self) -> list[dict[str, str]]:
        """The messages with their content as text. UserError where there is nothing to answer."""
        if self.messages[-1].role == "assistant":
            raise UserError("the last message is the assistant's, so there is nothing to answer")
        found = []
        for turn in self.messages:
            text = turn.content if isinstance(turn.content, str) else "".join(part.text for part in turn.content)
            found.append({"role": turn.role, "content": text})
        return found


class CompletionBody(_Body):
    """Of /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=5)


@dataclass
class Writing:
    """One answer as it comes: its text so far, and why it has ended."""

    personal: Personal
    prompt: Sequence[int]
    stops: Sequence[str]
    chat: bool  # its text is what `chat` shows, without reasoning; else the tokens' as they are
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    sent: int = 0  # how much of it can be sent; its end may begin a stop sequence, or be half a character
    finish: str = ""
    answer: LiveAnswer | None = None
    news: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)

    def hear(self, loop: asyncio.AbstractEventLoop, news: int | Exception | None) -> None:
        loop.call_soon_threadsafe(self.news.put_nowait, news)

    def add(self, news: int | Exception | None) -> str:
        """What can be sent now. Raises what ended the answer before its end."""
        if isinstance(news, Exception):
            raise news
        if news is None:
            self.finish = self.finish or ("length" if self.answer and self.answer.room < 1 else "stop")
            return self._release(len(self.text))
        self.tokens.append(news)
        base = self.personal.base
        if self.chat:
            self.text = base.answer_text(self.prompt, self.tokens)
        else:
            self.text = base.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if indices := [index for stop in self.stops if (index := self.text.find(stop)) >= 0]:
            self.text, self.finish = self.text[: min(indices)], "stop"
            self.stop()
            return self._release(len(self.text))
        if self.chat and THINK.startswith(self.text):
            return ""
        begun = (n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return self._release(min(len(self.text.rstrip("\ufffd")), len(self.text) - max(begun, default=0)))

    def _release(self, until: int) -> str:
        new, self.sent = self.text[self.sent : until], max(self.sent, until)
        return new

    def log_probabilities(self, first: int = 0) -> JsonValue:
        """Of its tokens from the `first` on, in the form of the route; None where nobody has asked for them."""
        if self.answer is None or self.answer.likeliest is None:
            return None
        known, decode = self.answer.logprobs[first : len(self.tokens)], self.personal.base.tokenizer.decode

        def entry(token: int, value: float) -> dict[str, JsonValue]:
            text = decode([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        if self.chat:
            content: list[JsonValue] = [
                {**entry(each.token, each.value), "top_logprobs": [entry(*pair) for pair in each.likeliest]}
                for each in known
            ]
            return {"content": content}
        return {
            "tokens": [decode([each.token]) for each in known],
            "token_logprobs": [each.value for each in known],
            "top_logprobs": [{decode([token]): value for token, value in each.likeliest} for each in known],
        }

    def stop(self) -> None:
        """Nobody listens any more, so its row is free."""
        if self.answer is not None:
            self.answer.stopped = True


class Routes:
    """The routes of one server. `key`: what a request must bring; empty: nothing."""

    def __init__(self, server: ModelServer, key: str):
        self.server, self.key, self.born = server, key, int(time.time())

    def app(self) -> FastAPI:
        app = FastAPI(title="llm-fed", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(RequestValidationError, _invalid)
        app.add_middleware(KeyCheck, key=self.key)  # type: ignore[arg-type]  # as starlette has it
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/completions", response_model=None)(self.complete)
        return app

    async def health(self) -> Response:
        failed = self.server.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok", **self.server.load}, 503 if failed else 200)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.server.models]})

    async def model(self, name: str) -> Response:
        return JSONResponse(self._described(name)) if name in self.server.models else self._unknown(name)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        try:
            wanted = body.wanted((body.top_logprobs or 0) if body.logprobs else None, body.max_completion_tokens)
            return await self._answer(request, body, [body.turns()], wanted, chat=True)
        except UserError as error:
            return _error(400, str(error))

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        try:
            return await self._answer(request, body, prompts, body.wanted(body.logprobs), chat=False)
        except UserError as error:
            return _error(400, str(error))

    async def _answer(
        self, request: Request, body: _Body, prompts: Sequence[str | Conversation], wanted: Wanted, *, chat: bool
    ) -> Response:
        if body.model not in self.server.models:
            return self._unknown(body.model)
        personal = self.server.models[body.model].personal
        loop, writings = asyncio.get_running_loop(), list[Writing]()
        ids = [self.server.prompt(body.model, prompt) for prompt in prompts]
        try:
            for prompt in ids:
                writing = Writing(personal, prompt, body.stops, chat)
                writings.append(writing)
                hear = lambda news, to=writing: to.hear(loop, news)  # noqa: E731
                writing.answer = self.server.ask(body.model, prompt, wanted, hear)
        except Busy:
            for writing in writings:
                writing.stop()
            return _error(429, "too many requests wait; try again", {"Retry-After": "1"})
        except RunError as error:
            return _error(503, str(error))
        request.state.about = f"{body.model}, {sum(map(len, ids))} tokens of prompt"
        head = ReplyHead(body.model, chat)
        if body.stream:
            told = bool((body.stream_options or {}).get("include_usage"))
            return StreamingResponse(_events(head, writings, told), media_type="text/event-stream")
        try:
            for writing in writings:
                await _whole(writing, request)
        except Exception as error:  # whatever ended the answer
            return _error(500, one_line(str(error)))
        finally:
            for writing in writings:
                writing.stop()
        choices = [head.choice(n, each.text, each.finish, each.log_probabilities()) for n, each in enumerate(writings)]
        return JSONResponse(head.reply(choices, False, _usage(writings)))

    def _described(self, name: str) -> dict[str, JsonValue]:
        return {"id": name, "object": "model", "created": self.born, "owned_by": "llm-fed"}

    def _unknown(self, name: str) -> Response:
        known = ", ".join(self.server.models)
        return _error(404, f"there is no model {one_line(name, 60)!r}; known: {known}")


class KeyCheck:
    """Keys, and a line for each request, without its text, when it is done."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), "left"

        async def sent(message: Message) -> None:
            nonlocal status
            status = str(message.get("status", status))
            await send(message)

        given = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
        known = not self.key or scope["path"] == "/health" or hmac.compare_digest(given.encode(), self.key.encode())
        app = self.app if known else _error(401, "the key is wrong or missing; send Authorization: Bearer KEY")
        try:
            await app(scope, receive, sent)
        finally:
            about = scope.get("state", {}).get("about", "")
            where = printable(one_line(scope["path"], 60))
            _log(f"{scope['method']} {where} {status} {time.perf_counter() - began:.2f} s {about}".rstrip())


@dataclass
class ReplyHead:
    """What all parts of a reply share, and how a part is written."""

    model: str
    chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def reply(self, choices: list[JsonValue], part: bool, usage: JsonValue = None) -> JsonValue:
        kind = ("chat.completion.chunk" if part else "chat.completion") if self.chat else "text_completion"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        reply: dict[str, JsonValue] = {"id": name, "object": kind, "created": self.created, "model": self.model}
        return {**reply, "choices": choices, **({"usage": usage} if usage else {})}

    def choice(self, n: int, text: str, finish: str | None, likely: JsonValue, part: bool = False) -> JsonValue:
        said: dict[str, JsonValue] = {"text": text}
        if self.chat:
            said = {"delta" if part else "message": {"role": "assistant", "content": text}}
        return {"index": n, **said, "logprobs": likely, "finish_reason": finish}


async def _whole(writing: Writing, request: Request) -> None:
    """Until the answer has ended; one whose client has left is stopped."""
    looked = time.monotonic()
    while not writing.finish:
        with suppress(TimeoutError):
            writing.add(await asyncio.wait_for(writing.news.get(), WATCH))
        if time.monotonic() - looked > WATCH:
            looked = time.monotonic()
            if await request.is_disconnected():
                writing.finish = "stop"


async def _events(head: ReplyHead, writings: Sequence[Writing], told: bool) -> AsyncIterator[str]:
    """Server-sent events, a part each; a client that leaves ends this, and so the answers."""
    try:
        for n, writing in enumerate(writings):
            told_tokens = 0
            while not writing.finish:
                text = writing.add(await writing.news.get())
                if text or writing.finish:
                    likely, told_tokens = writing.log_probabilities(told_tokens), len(writing.tokens)
                    yield _event(head.reply([head.choice(n, text, writing.finish or None, likely, part=True)], True))
        if told:
            yield _event(head.reply([], True, _usage(writings)))
        yield "data: [DONE]\n\n"
    except Exception as error:  # whatever ended the answer; the status is sent already
        yield _event({"error": {"message": one_line(str(error)), "type": "server_error"}})
    finally:
        for writing in writings:
            writing.stop()


def _event(value: JsonValue) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _usage(writings: Sequence[Writing]) -> JsonValue:
    read, written = sum(len(each.prompt) for each in writings), sum(len(each.tokens) for each in writings)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, dict(headers or {}))


async def _invalid(request: Request, error: Exception) -> Response:
    """What pydantic says of a body, as OpenAI's error of code 400."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return _error(400, one_line(f"{where}: {first['msg']}" if where else str(first["msg"])))


def _log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def listening(host: str, port: int, key: str) -> socket.socket:
    """A socket at this address. UserError: another program listens there, or anybody could ask without a key."""
    if host not in LOOPBACK and not key:
        raise UserError(f"--host {host} would answer anybody who can reach it; set --api-key, or leave out --host")
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if sys.platform != "win32":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror or error}; give another --port") from error
    return found


def program(server: ModelServer, key: str) -> uvicorn.Server:
    """What speaks HTTP. Idle connections stay longer than clients keep them, so that none is closed as it is used."""
    app = Routes(server, key).app()
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75, ws="none"))


def run(server: ModelServer, found: socket.socket, key: str) -> None:
    """Serve until Ctrl-C."""
    host, port = found.getsockname()[:2]
    _log(f"serving {', '.join(server.models)} at http://{host}:{port}/v1")
    try:
        program(server, key).run(sockets=[found])
    finally:
        server.close()
