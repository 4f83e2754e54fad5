"""Requests that come at once to a server that speaks as OpenAI's does: how many are answered, and tokens per second.

python scripts/bench/serving.py http://127.0.0.1:8000/v1 prompts.txt [--models a,b] [--count 50] [--tokens 32]

The prompts are the lines of the file, in turn, and so are the models (default: all that the server has).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import httpx


@dataclass(frozen=True)
class Load:
    """What a server answered, in how many seconds."""

    answers: int
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def at_once(url: str, prompts: Sequence[str], models: Sequence[str] = (), count: int = 50, tokens: int = 32) -> Load:
    """Ask for so many answers at once, each of at most so many tokens, of these models or of all; one before them warms
    the server up."""
    client = httpx.Client(base_url=url, timeout=3600, limits=httpx.Limits(max_connections=None))
    models = models or [each["id"] for each in client.get("models").raise_for_status().json()["data"]]
    asked = list(islice(zip(cycle(models), cycle(prompts), strict=False), count))

    def answer(pair: tuple[str, str]) -> int:
        message = {"role": "user", "content": pair[1]}
        body = {"model": pair[0], "messages": [message], "max_tokens": tokens, "temperature": 0}
        return int(client.post("chat/completions", json=body).raise_for_status().json()["usage"]["completion_tokens"])

    answer(asked[0])
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        written = list(pool.map(answer, asked))
    return Load(len(written), sum(written), time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    models = [name for name in given.models.split(",") if name]
    load = at_once(given.url, given.prompts.read_text().splitlines(), models, given.count, given.tokens)
    print(f"{load.answers} answers, {load.tokens} tokens in {load.seconds:.1f} s: {load.rate:.1f} tokens/s")


if __name__ == "__main__":
    main()
