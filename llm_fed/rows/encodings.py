"""Which encoding a text is in that is no UTF-8.

Each encoding is tried. In the right one nearly all letters beyond ASCII are such as its languages write all the time;
in a wrong one they are rare signs, capitals within words, or symbols. Where two fit alike, none is taken, but for
Windows-1252 among those of accents.
"""

from __future__ import annotations

import re
from functools import cache

ENOUGH = 0.85  # share of the letters beyond ASCII that an encoding's languages must write often
MARGIN = 0.05  # by which the next encoding must fit less
FEW = 12  # bytes beyond ASCII that say too little for a script of its own
NAMES = {
    "cp1252": "Windows-1252", "latin-1": "Latin-1", "cp1250": "Windows-1250", "cp1254": "Windows-1254",
    "cp1251": "Windows-1251", "koi8_r": "KOI8-R", "cp1253": "Windows-1253", "gb18030": "GB18030", "big5": "Big5",
    "shift_jis": "Shift-JIS", "euc_jp": "EUC-JP", "cp949": "EUC-KR",
}  # fmt: skip
_SYMBOLS = re.compile(r"(?<![a-z])[£§°²³½¼¾©®ªº±](?![a-z])")  # of western encodings; between letters they are none
_SIGNS = "«»„“”‚‘’–—…·"
_CYRILLIC = "абвгдежзийклмнопрстуфхцчшщъыьэюяёіїєґў"
_ACCENTED = {  # letters beyond ASCII stand alone among others
    "cp1252": "àáâãäåæçèéêëìíîïñòóôõöøùúûüßœšžÀÁÂÄÅÆÇÈÉÊËÍÎÑÓÔÖØÚÜŒŠŽ¿¡€" + _SIGNS,
    "cp1250": "ąćęłńóśźżĄĆĘŁŃÓŚŹŻáčďéěíňřšťúůýžÁČĎÉĚÍŇŘŠŤÚŮÝŽäöüőűÄÖÜŐŰß€" + _SIGNS,
    "cp1254": "ğüşıöçİĞÜŞÖÇâîû€" + _SIGNS,
}
_SCRIPTS = {
    "cp1251": _CYRILLIC + "№" + _SIGNS,
    "koi8_r": _CYRILLIC,
    "cp1253": "αβγδεζηθικλμνξοπρστυφχψωςάέήίόύώϊϋΐΰ" + _SIGNS,
}
# Two bytes a sign: the table, the first bytes of the frequent signs, and of those that any longer text has some of.
_ASIAN = {
    "gb18030": ("gb2312", range(0xB0, 0xD8), range(0xC9, 0xD8)),  # those before are indices of Hangul, too
    "big5": ("big5", range(0xA4, 0xC7), range(0xA4, 0xB0)),
    "shift_jis": ("euc_jp", range(0xB0, 0xD0), range(0xA4, 0xA6)),  # Kana
    "euc_jp": ("euc_jp", range(0xB0, 0xD0), range(0xA4, 0xA6)),
    "cp949": ("euc_kr", range(0xB0, 0xC9), range(0xB0, 0xC9)),
}


def encoding_of(sample: bytes) -> str | None:
    """The codec of a text, a key of NAMES, by lines of it that are no UTF-8; None: it cannot be told."""
    high = len(re.findall(rb"[\x80-\xff]", sample))
    alone = len(re.findall(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])", sample))  # accents are, mostly
    tried = [*_ACCENTED] if alone >= 0.4 * high or high <= 4 else [*_SCRIPTS, *_ASIAN] if high >= FEW else []
    fits = {codec: share for codec in tried if (share := _share(sample, codec)) >= ENOUGH}
    best = max(fits, key=fits.__getitem__, default=None)
    if best is None:
        return None
    close = [codec for codec in fits if codec != best and fits[codec] > fits[best] - MARGIN]
    if "cp1252" in (best, *close):
        return "latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", sample) else "cp1252"
    return None if close else best


def _share(sample: bytes, codec: str) -> float:
    """The share of the letters beyond ASCII that are frequent ones, were the text in this encoding."""
    try:
        text = sample.decode(codec)
    except UnicodeDecodeError:
        if codec != "cp1252":
            return 0.0
        text = sample.decode("latin-1")
    letters = [char for char in _SYMBOLS.sub("", text) if not char.isascii()]
    if codec in _ASIAN and not any(char in _signs(*_ASIAN[codec][::2]) for char in letters):
        return 0.0
    return sum(char in _frequent(codec) for char in letters) / max(1, len(letters))


@cache
def _frequent(codec: str) -> frozenset[str]:
    if codec not in _ASIAN:
        return frozenset((_ACCENTED | _SCRIPTS)[codec])
    table, first, telling = _ASIAN[codec]
    return _signs(table, first) | _signs(table, telling) | frozenset("，。、？！：；“”‘’（）《》「」『』·—…　～％ー")


@cache
def _signs(table: str, first: range) -> frozenset[str]:
    """The signs of a table whose first byte is one of these."""
    pairs = (bytes([one, other]) for one in first for other in range(0x40, 0xFF))
    return frozenset("".join(pair.decode(table, "ignore") for pair in pairs)) - frozenset(map(chr, range(128)))
