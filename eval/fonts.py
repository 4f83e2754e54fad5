"""Names in any script in pictures: in an installed font that has their characters, else spelled in Latin letters."""

from __future__ import annotations

import logging
from functools import cache, lru_cache

import matplotlib as mpl
from anyascii import anyascii
from matplotlib import font_manager
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator

log = logging.getLogger(__name__)
PLACEHOLDERS = "last resort"  # a font of boxes, one for each script


def make_legible(figure: Figure) -> None:
    """Let every text of a figure be drawn in fonts that have its characters; what no installed font has is spelled in
    Latin letters, and it is said once which characters these are."""
    figure.draw_without_rendering()  # which makes the labels at the ticks
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    characters = {character for text in texts for character in text.get_text() if character.isprintable()}
    usual = _characters(font_manager.findfont(font_manager.FontProperties()))
    chosen, unknown = covering(frozenset(characters - usual))
    for text in texts:
        text.set_fontfamily([*mpl.rcParams["font.family"], *chosen])
    if unknown:
        _tell("".join(sorted(unknown)))
        for axis in figure.findobj(Axis):
            labels = [label.get_text() for label in axis.get_ticklabels()]
            if any(unknown & set(label) for label in labels):
                axis.set_major_locator(FixedLocator(axis.get_ticklocs().tolist()))
                axis.set_ticklabels([spelled(label, unknown) for label in labels], parse_math=False)
        for text in texts:
            text.set_text(spelled(text.get_text(), unknown))


@lru_cache
def covering(wanted: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """(families of installed fonts that together have these characters, the characters that none has)."""
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in sorted(set(font_manager.findSystemFonts()) - known):  # installed since matplotlib last looked
        try:
            font_manager.fontManager.addfont(path)
        except (OSError, RuntimeError, ValueError):  # of a kind that matplotlib cannot draw
            continue
    families: list[str] = []
    while wanted:
        best = max(_plain_fonts(), key=lambda entry: (len(wanted & _characters(entry.fname)), entry.name), default=None)
        if best is None or not wanted & _characters(best.fname):
            break
        families.append(best.name)
        wanted -= _characters(best.fname)
    return tuple(families), wanted


def spelled(text: str, unknown: frozenset[str]) -> str:
    return "".join(anyascii(character) or "?" if character in unknown else character for character in text)


def _plain_fonts() -> list[font_manager.FontEntry]:
    return [
        entry
        for entry in font_manager.fontManager.ttflist
        if entry.style == "normal" and entry.weight in (400, "normal") and PLACEHOLDERS not in entry.name.lower()
    ]


@lru_cache
def _characters(path: str) -> frozenset[str]:
    try:
        return frozenset(map(chr, font_manager.get_font(path).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()


@cache  # said once of the same characters
def _tell(characters: str) -> None:
    shown = characters if len(characters) <= 12 else f"{characters[:11]}…"
    log.warning(
        "no installed font has %s, so pictures spell them in Latin letters; with a font that has them, such as Noto "
        "(Debian: fonts-noto-cjk, fonts-noto), they stand there as they are",
        shown,
    )
