"""Requests that come at once to a server that speaks as OpenAI's does: how many are answered, and tokens per second.

python scripts/bench/serving.py http://127.0.0.1:8000/v1 prompts.txt [--models a,b] [--count 50] [--tokens 32]

The prompts are the lines of the file, in turn, and so are the models (default: all that the server has).
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import httpx


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    client = httpx.Client(base_url=given.url, timeout=3600, limits=httpx.Limits(max_connections=None))
    models = given.models.split(",") if given.models else [each["id"] for each in client.get("models").json()["data"]]
    asked = list(islice(zip(cycle(models), cycle(given.prompts.read_text().splitlines()), strict=False), given.count))

    def answer(pair: tuple[str, str]) -> int:
        message = {"role": "user", "content": pair[1]}
        body = {"model": pair[0], "messages": [message], "max_tokens": given.tokens, "temperature": 0}
        return int(client.post("chat/completions", json=body).raise_for_status().json()["usage"]["completion_tokens"])

    answer(asked[0])
    began = time.perf_counter()
    with ThreadPoolExecutor(given.count) as pool:
        tokens = list(pool.map(answer, asked))
    seconds = time.perf_counter() - began
    print(f"{len(tokens)} answers, {sum(tokens)} tokens in {seconds:.1f} s: {sum(tokens) / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
