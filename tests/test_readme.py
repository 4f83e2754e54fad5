"""The first page: short enough to be read, its links lead somewhere, and its method is what it says."""

from __future__ import annotations

import re

import outside

from llm_fed.testing.federation import ADAPTERS, go

README = (outside.ROOT / "README.md").read_text()


def test_it_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_its_links_and_those_of_the_pages_lead_somewhere():
    for page in [outside.ROOT / "README.md", outside.ROOT / "CONTRIBUTING.md", *(outside.ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_its_method_is_federated_averaging(tmp_path, here):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class " in block)
    outside.module(here, "printed", outside.IMPORTS + code)
    found, expected = (
        go({"name": name}, ADAPTERS, tmp_path / name.partition(":")[0]) for name in ("printed:FedAvg", "fedavg")
    )
    assert found.state.equal(expected.state) and found.losses() == expected.losses()
