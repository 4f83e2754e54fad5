"""A hook of mkdocs: what stands in pages as GitHub draws it, drawn by the site without a script or another host.

- A formula is LaTeX between dollars and backticks, $`\\theta`$, and becomes MathML. Where latex2mathml is missing
  (`pip install -e '.[docs]'`), formulas stay code, as a line of the build says.
- A <picture> that is another one in the dark follows the switch of the site, and not only the reader's system.
"""

from __future__ import annotations

import html
import logging
import re
from importlib.util import find_spec
from typing import Any

_FORMULA = re.compile(r"\$<code>(.*?)</code>\$")
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)"(?P<more>[^>]*)>\s*</picture>'
)
_LOG = logging.getLogger("mkdocs.plugins.site_drawn")


def on_config(config: Any) -> Any:
    if find_spec("latex2mathml") is None:
        _LOG.info("formulas stay code, as latex2mathml is not installed: pip install -e '.[docs]'")
    return config


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with each formula and picture as the site draws it."""
    content = _PICTURE.sub(r'<img src="\g<light>#only-light"\g<more>><img src="\g<dark>#only-dark"\g<more>>', content)
    if find_spec("latex2mathml") is None or not _FORMULA.search(content):
        return content
    from latex2mathml.converter import convert  # of the extra `docs`

    def drawn(match: re.Match[str]) -> str:
        formula = html.unescape(match[1])
        return f'<span class="formula" title="{html.escape(formula)}">{convert(formula)}</span>'

    return _FORMULA.sub(drawn, content)
