"""The sample predictions of a report: what stands around every prompt is shown once, and not with each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_fed.eval.report.reading import Line


@dataclass(frozen=True)
class ClientSamples:
    client: str
    system: str  # the system text of all these samples; empty where they have none, or several
    lines: Sequence[Line]  # with `text` and `system`: the prompt without the template, and its own system text


@dataclass(frozen=True)
class SamplesSection:
    """For the template."""

    templates: Sequence[str]  # with {prompt} in the prompt's place and {system} in that of the data's system text
    system: str  # the system text of all samples; empty where they have none, or several
    clients: Sequence[ClientSamples]
    seen: int = 8  # clients that are listed at once; the others are folded


def samples_of(lines: Sequence[Line]) -> SamplesSection:
    samples = [{"system": "", "base": None} | line for line in _with_texts(lines)]
    by_client: dict[str, list[Line]] = {}
    for line in samples:
        by_client.setdefault(line["client"], []).append(line)
    templates = list(dict.fromkeys(line["template"] for line in samples if line.get("template")))
    everywhere = _same_system(samples)
    clients = [ClientSamples(id, "" if everywhere else _same_system(own), own) for id, own in by_client.items()]
    return SamplesSection([text for text in templates if text.strip() != "{prompt}"], everywhere, clients)


def _same_system(lines: Sequence[Line]) -> str:
    systems = {line["system"] for line in lines}
    return str(systems.pop()) if len(systems) == 1 else ""


def _with_texts(lines: Sequence[Line]) -> list[Line]:
    """The lines with their `text`: the whole prompt where it is not known which part of it the data have."""
    return [{"text": str(line["prompt"]), "template": "{prompt}", **line} for line in lines]
