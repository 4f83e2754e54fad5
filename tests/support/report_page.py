"""A made-up run folder, and what a reader finds in the page that is made of it."""

import json
import math
import re
from html.parser import HTMLParser

from llm_fed.eval.report import write_report
from llm_fed.scoring.scores import summarize

CLIENTS = ["snli", "cola", "trec", "wic"]
CONFIG = """\
format: 1
seed: 3
rounds: 20
base: {name: some/base-3B}
method: {name: fedmerge, num_models: 2}
task: {name: flan, path: null}
"""


def write_run(folder, rounds=20, clients=CLIENTS, final=True, tail=""):
    """A run's folder as the round loop writes it; client number i scores 40 + 4 i on the test split."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    lines, timing = [], []
    for number in range(1, rounds + 1):
        losses = {client: 2 * math.exp(-number / 8) + 0.1 * i for i, client in enumerate(clients)}
        if number % 10 == 0:
            losses[clients[0]] = None
            event = {"client": clients[0], "event": "client failed", "reason": "the loss is not finite at step 3"}
            lines.append({"kind": "event", "round": number, **event})
        for client, loss in losses.items():
            work = {"loss": loss, "steps": 20, "examples": 300, "bytes_up": 1500, "bytes_down": 2500, "staleness": 0}
            lines.append({"kind": "client", "round": number, "client": client, **work})
        counts = {"asked": 4, "arrived": 4, "refused": 0, "failed": int(number % 10 == 0)}
        traffic = {"bytes_up": 6000, "bytes_down": 10000, "padding": 0.07}
        lines.append({"kind": "round", "round": number, "lr": 1e-4, "loss": 2.0 / number, **counts, **traffic})
        weights = {"clients": clients, "values": [[number / 20, 1 - number / 20] for _ in clients]}
        lines.append({"kind": "server", "round": number, "weights": weights})
        if number % 5 == 0:
            lines.append(score_line(number, "validation", clients, 30 + number / 2))
        timing.append({"round": number, "seconds": 12.0, "parts": {"local": 11.4, "server": 0.6}})
    if final:
        lines.append(score_line(15, "test", clients, 40))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + tail, errors="surrogateescape"
    )
    (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))
    return folder


def score_line(number, split, clients, lowest):
    losses = {client: 1 + i / 4 for i, client in enumerate(clients)}
    losses[clients[1]] = None if number == 5 else 1.25
    summary = summarize("rouge1", {client: lowest + 4.0 * i for i, client in enumerate(clients)}, losses)
    return {"kind": "score", "round": number, "split": split, **summary.as_json()}


class Page(HTMLParser):
    """Tags, addresses and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.text, self.inside = [], [], "", ""
        self.feed(html)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag  # of a script, text is what the script reads
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data):
        self.text += " " + data if self.inside not in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.inside = ""


def read(run):
    return Page(write_report(run).read_text(encoding="utf-8"))
