"""Texts written inside of a text in another alphabet: base64, hexadecimal digits, and letters set apart.

A model reads these, so guards read them, too. A piece counts only if what comes out is text in printable characters
with letters for the most part; random bytes, keys and pictures are none. What is left of a text without its unreadable
pieces and without letters of other scripts, which the classifiers do not know, is one more text: no number of them
outweighs what stands beside them.
"""  # decider

import base64
import binascii
import re
from collections.abc import Iterator

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{24,}(?:\r?\n[A-Za-z0-9+/_-]{4,})*={0,2}")
_HEXADECIMAL = re.compile(r"(?:[0-9A-Fa-f]{2}){16,}")
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/]")
# Possessive, and ended by any sign that is no letter: where a long row cannot match, no letter of it is a new start.
_APART = re.compile(r"(?<!\S)[^\W\d_](?!\w)(?:[ .*|-]{1,3}[^\W\d_](?!\w)){8,}+")
_GAP = re.compile(r"(?<=\S)[ .*|-](?=\S)")  # between two letters of one word
# Runs of base64 or long names, and letters of scripts other than Latin with their marks and signs.
_UNREADABLE = re.compile(
    r"[A-Za-z0-9+/_-]{24,}={0,2}|[\u0250-\u1dff\u2c00-\ud7ff\uf900-\U0003ffff]+"
)
_LATIN_WORD = re.compile(r"[A-Za-z]{2}")
_LEAST_UNREADABLE = 100  # characters; fewer do not outweigh what stands beside them
_BESIDE = 4000  # characters before and behind an unreadable piece, more than it can outweigh
_MOST_PIECES = 64  # that are read of one text
_LEAST_LETTERS = 0.6  # letters and spaces of all characters
_MOST_DEPTH = 2  # base64 within base64


def read_disguised(text: str, depth: int = 0) -> Iterator[str]:
    """Yield the texts that a text hides. Together they are at most twice as long as the text."""
    is_mixed = not text.isascii()
    for number, match in enumerate(_BASE64.finditer(text)):
        is_mixed = True
        if number == _MOST_PIECES or depth == _MOST_DEPTH:
            break
        inner = _decode(match[0])
        if inner is not None:
            yield inner
            yield from read_disguised(inner, depth + 1)
    for number, match in enumerate(_APART.finditer(text)):
        if number == _MOST_PIECES:
            break
        yield _GAP.sub("", match[0])
    if depth == 0 and is_mixed and _LATIN_WORD.search(rest := _read_beside(text)):
        yield rest


def _read_beside(text: str) -> str:
    """Return what stands before and behind unreadable pieces, without them; empty if there are few."""
    parts = _UNREADABLE.split(text)
    if len(text) - sum(map(len, parts)) < _LEAST_UNREADABLE:
        return ""
    cut = (p if len(p) <= 2 * _BESIDE else f"{p[:_BESIDE]}\n{p[-_BESIDE:]}" for p in parts)
    return " ".join(cut)


def _decode(piece: str) -> str | None:
    """Return the text that hexadecimal digits or base64 stand for; None where it is no text."""
    joined = "".join(piece.split()).rstrip("=")
    if _HEXADECIMAL.fullmatch(joined):
        return _as_text(bytes.fromhex(joined))
    if joined.isalpha() and (joined.islower() or joined.isupper()):
        return None  # a long word
    plain = joined.replace("-", "+").replace("_", "/")
    if _NOT_BASE64.search(plain):
        return None
    whole = plain[: len(plain) // 4 * 4] if len(plain) % 4 == 1 else plain
    try:
        return _as_text(base64.b64decode(whole + "=" * (-len(whole) % 4)))
    except binascii.Error:
        return None


def _as_text(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:  # the piece may have been cut within a letter
        if error.start < len(data) - 4:
            return None
        text = data[: error.start].decode("utf-8")
    num_letters = sum(sign.isalpha() or sign.isspace() for sign in text)
    is_text = text.replace("\n", "").replace("\t", "").replace("\r", "").isprintable()
    return text if text and is_text and num_letters >= _LEAST_LETTERS * len(text) else None
