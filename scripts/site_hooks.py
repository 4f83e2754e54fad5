"""Hooks of mkdocs: what the documentation site has beside the files in docs/.

`mkdocs build` (see mkdocs.yml) reads the pages of docs/ as they are. Here come the pages that lie elsewhere, those
that are made of the program, and pages of the source files that are linked to.
"""

from __future__ import annotations

import json
from typing import Any

import site_links
import site_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills in the parts of the navigation that are lists of generated pages."""
    methods = [("The list", "methods.md", ""), *site_pages.methods()]
    made = {"All methods": methods, "Python interface": site_pages.interface()}
    for shelf in config.nav or []:
        for entry in next(iter(shelf.values())):
            for title in entry:
                if title in made:
                    entry[title] = [{name: uri} for name, uri, _ in made[title]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside docs/, those made of the program, and the source files that any of them links to."""
    kept = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    made = {path: _text(path) for path in site_links.PAGES}
    made |= {f"docs/{uri}": text for _, uri, text in [*site_pages.methods(), *site_pages.interface()]}
    for path, text in made.items():
        files.append(File.generated(config, site_links.place(path), content=text))
    for uri, text in site_links.sources(kept | made).items():
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them."""
    path = site_links.origin(page.file.src_uri)
    if page.file.src_uri.startswith("source/"):
        return markdown
    if path in ("docs/methods.md", "docs/formulas.md"):
        markdown = site_pages.linked(markdown)
    markdown = markdown.replace(" ± ", "\u00a0±\u00a0")  # which narrow tables would break
    return site_links.placed(markdown, path)


def _text(path: str) -> str:
    text = (site_links.ROOT / path).read_text()
    return _notebook(json.loads(text)) if path.endswith(".ipynb") else text


def _notebook(book: dict[str, Any]) -> str:
    """Its cells, without what came out of them."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)
