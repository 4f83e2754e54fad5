"""A hook of mkdocs: formulas in the pages, which stand there as GitHub reads them, become MathML, which browsers draw.

A formula is LaTeX between dollars and backticks, $`\\theta`$. It needs no script and no font of another host. Where
latex2mathml is missing (`pip install -e '.[docs]'`), formulas stay code, as a line of the build says.
"""

from __future__ import annotations

import html
import logging
import re
from importlib.util import find_spec
from typing import Any

_FORMULA = re.compile(r"\$<code>(.*?)</code>\$")
_LOG = logging.getLogger("mkdocs.plugins.site_math")


def on_config(config: Any) -> Any:
    if find_spec("latex2mathml") is None:
        _LOG.info("formulas stay code, as latex2mathml is not installed: pip install -e '.[docs]'")
    return config


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with MathML in the place of each formula."""
    if find_spec("latex2mathml") is None or not _FORMULA.search(content):
        return content
    from latex2mathml.converter import convert  # of the extra `docs`

    def drawn(match: re.Match[str]) -> str:
        formula = html.unescape(match[1])
        markup = convert(formula)
        return f'<span class="formula" title="{html.escape(formula)}">{markup}</span>'

    return _FORMULA.sub(drawn, content)
