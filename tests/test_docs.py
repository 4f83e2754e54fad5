"""The pages: short enough to read, and without a link that leads nowhere."""

import re
from pathlib import Path

import every

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
LONG = {f"docs/{name}.md" for name in ("long",)}


def prose(text: str) -> str:
    """Without blocks of code, in which brackets mean something else."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names by which GitHub links to headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    found = [one or other for one, other in LINK.findall(prose(page.read_text()))]
    for target in (target for target in found if "://" not in target and not target.startswith("mailto:")):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(goal.read_text()), f"{name}: {target}"


def can_be_read(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) <= 200
    for number, line in enumerate(lines, 1):
        assert len(line) <= 120 or line.startswith("|"), f"{name}:{number} has {len(line)} characters"


def test_links_lead_somewhere():
    every.passes(PAGES, links_lead_somewhere)


def test_a_page_can_be_read():
    every.passes([name for name in PAGES if name not in LONG], can_be_read)
