"""Texts written inside of a text in another alphabet: base64, hexadecimal digits, letters set apart, and look-alikes.

A model reads these, so guards read them, too. A piece counts only if what comes out is text in printable characters
with letters for the most part; random bytes, keys and pictures are none. What is left of a text without its unreadable
pieces and without letters of other scripts, which the classifiers do not know, is one more text: no number of them
outweighs what stands beside them.
"""  # decider

import base64
import binascii
import re
import unicodedata
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
# Characters that have no shape of their own, among them marks that are put over letters.
INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff\u20e3"
)
# Of Thai, Lao, Burmese, Khmer, Chinese and Japanese, and of Korean, where words take endings.
UNSPACED_LETTERS = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u318f\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_MARKS = re.compile(
    f"[{INVISIBLE}\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+"
)
_TAGS = {
    0xE0000 + code: code for code in range(0x20, 0x7F)
}  # invisible copies of ASCII, which models read
# Letters of other scripts, and small capitals, that look like Latin ones.
_LOOKALIKES = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0445\u0443\u0456\u0458\u0455\u04bb\u0501\u051b\u051d\u043a\u043c"
    "\u0442\u043d\u0432\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0425\u0423\u0406"
    "\u0408\u0405\u050c\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5"
    "\u03a7\u03b1\u03b5\u03bf\u03b9\u03bd\u03c5\u03c1\u03c4\u03ba\u03c9\u1d00\u0299\u1d04\u1d05\u1d07"
    "\ua730\u0262\u029c\u026a\u1d0a\u1d0b\u029f\u1d0d\u0274\u1d0f\u1d18\u0280\ua731\u1d1b\u1d1c\u1d20"
    "\u1d21\u028f\u1d22\u0131\u0251\u0261",
    "aeopcxyijshdqwkmthbABEKMHOPCTXYIJSGABEZHIKMNOPTYXaeoivuptkwabcdefghijklmnoprstuvwyziag",
)
_LOOKALIKES |= {
    first + number: ord("a") + number
    for first in (0x1F130, 0x1F150, 0x1F170, 0x1F1E6)  # letters in squares and circles
    for number in range(26)
}
_OTHER_LETTERS = re.compile(
    "[\u0131\u0250-\u02af\u0370-\u052f\u1d00-\u1d7f\ua730-\ua7ff\U0001f130-\U0001f1ff]"
)
_WORD = re.compile("[^\\W\\d_]+")
_ESCAPE = re.compile(r"\\u([0-9A-Fa-f]{4})|\\x([0-9A-Fa-f]{2})")
_LEAST_ESCAPES = 8
_LATIN_WORD = re.compile(r"[A-Za-z]{2}")
_LATIN_WORDS = re.compile(r"[A-Za-z0-9]+")
_LEAST_UNREADABLE = 100  # characters; fewer do not outweigh what stands beside them
_BESIDE = 4000  # characters before and behind an unreadable piece, more than it can outweigh
_MOST_PIECES = 64  # that are read of one text
_LEAST_LETTERS = 0.6  # letters and spaces of all characters
_MOST_DEPTH = 2  # base64 within base64


def read_disguised(text: str, depth: int = 0) -> Iterator[str]:
    """Yield the texts that a text hides. Together they are at most twice as long as the text."""
    if depth == 0:
        text, original = fold(text), text
        if text is not original and _LATIN_WORDS.findall(text) != _LATIN_WORDS.findall(original):
            yield text
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


def fold(text: str) -> str:
    """Return a text without invisible characters, marks and escapes, and with look-alikes as the letters they mimic."""
    if "\\u00" in text or "\\x" in text:
        escapes = _ESCAPE.findall(text)
        if len(escapes) >= _LEAST_ESCAPES:
            text = _ESCAPE.sub(_unescape, text)
    if text.isascii():
        return text
    plain = unicodedata.normalize("NFKD", text.translate(_TAGS))[: 2 * len(text)]
    plain = _MARKS.sub("", plain)
    if _OTHER_LETTERS.search(plain) is None:
        return plain
    return _WORD.sub(_fold_word, re.sub(r"[\U0001f130-\U0001f1ff]+", _fold_word, plain))


def _fold_word(match: re.Match[str]) -> str:
    """Return a word in Latin letters if its others all look like some; words of other scripts stay as they are."""
    word = match[0]
    if word.isascii():
        return word
    latin = word.translate(_LOOKALIKES)
    return latin if latin.isascii() else word


def _unescape(match: re.Match[str]) -> str:
    code = int(match[1] or match[2], 16)
    return "" if 0xD800 <= code <= 0xDFFF else chr(code)  # half of a picture


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
