"""Texts written inside of a text in another alphabet: base64, base32, numbers of characters, letters set apart, and
look-alikes; `ciphers` has those that keep their letters.

A model reads these, so guards read them, too. A piece counts only if what comes out is text in printable characters
with letters for the most part; random bytes, keys and pictures are none. What is left of a text without its unreadable
pieces and without letters of other scripts, which the classifiers do not know, is one more text: no number of them
outweighs what stands beside them.
"""  # decider

import base64
import binascii
import collections
import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Literal

from dynamo.semantic.classifiers import ciphers, words

_LONG_RUN = re.compile(  # of signs of base64, by its start: few texts have one
    r"[^A-Za-z0-9+/_-][A-Za-z0-9+/_-]{24}"
)
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{24,}(?:\r?\n[A-Za-z0-9+/_-]{4,})*={0,2}")
# Base64 or hexadecimal digits with blanks between pieces: many of them have a capital or a digit behind a small letter.
_MIXED = re.compile(r"[A-Z0-9](?<=[a-z].)")
_ROW = re.compile(  # from the start of a piece on, else a long one would be looked at once from each of its signs
    r"[A-Za-z0-9+/_-](?<![A-Za-z0-9+/_-].)[A-Za-z0-9+/_-]*+(?:\s{1,4}[A-Za-z0-9+/_-]++)++"
)
_PLAIN_PIECE = re.compile(r"[A-Z]?[a-z]*")
_MOST_PLAIN = 2  # pieces in a row that look like words
_LEAST_SIGNS, _LEAST_MIXED = 24, 3
_HEXADECIMAL = re.compile(r"(?:[0-9A-Fa-f]{2}){16,}")
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/]")
_BASE32 = re.compile(r"[A-Z2-7]{24,}|[a-z2-7]{24,}")
# Patterns that begin with a class of characters are searched for faster, so what is before the first one comes behind.
_CODES = re.compile(  # three of the numbers of characters in a row, which few texts have
    r"[0-9][0-9A-Fa-f]{1,7}(?:[\s,;:-]{1,2}(?:0x)?[0-9][0-9A-Fa-f]{1,7}){2}[\s,;:-]"
)
_HEX_CODES = re.compile(  # 49 67 6e, 0x49,0x67: the numbers of characters
    r"[2-7](?<![0-9A-WYZa-wyz].)[0-9A-Fa-f](?:[\s,;:-]{1,2}(?:0x)?(?:[2-7][0-9A-Fa-f]|0[9AaDd])){11,}(?![0-9A-Za-z])"
)
_DECIMAL_CODES = re.compile(
    r"[1-9](?<![\w.].)(?:(?<=[4-9])\d|(?<=3)[2-9]|(?<=1)(?:[01]\d|2[0-6]))"
    r"(?:[\s,;]{1,2}(?:3[2-9]|[4-9]\d|1[01]\d|12[0-6]|9|1[03])){11,}(?!\w)"
)
_BINARY_CODES = re.compile(r"[01](?<!\d.)[01]{7}(?:[\s,]?[01]{8}){7,}(?!\d)")
_HEX_PAIR = re.compile(r"(?:0x)?([0-9A-Fa-f]{2})")
_LEAST_CODES = 12  # characters in such a row
# Possessive, and ended by any sign that is no letter: where a long row cannot match, no letter of it is a new start.
_APART = re.compile(
    r"[\s.,;:*|/~+=_-][^\W\d_][\s.,;:*|/~+=_-]{1,3}[^\W\d_](?![^\W_])"
    r"(?:[\s.,;:*|/~+=_-]{1,3}[^\W\d_](?![^\W_])){6,}+"
)
# Words that tell a cipher, and letters of which one stands in each English row of letters, and few anywhere else.
_TELLING_TOKENS = ciphers.TELLING_WORDS | frozenset("eo")
_GAP = re.compile(r"(?<=\S)[\s.,;:*|/~+=_-](?=\S)")  # between two letters of one word
_SIGN_BETWEEN = re.compile(r"[^\W\d_]([.,;:*|/~+=_-])(?=[^\W\d_])")
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
# invisible copies of ASCII, which models read
_TAGS = {0xE0000 + code: code for code in range(0x20, 0x7F)}
_TAG = re.compile("[\U000e0020-\U000e007e]")
_SIGNS = re.compile(r"[^\w\s\x00-\x7f\u2010-\u2049]+")  # the marks of other scripts are among them
# Of so many marks in a row those behind are left out: to bring n of them into their order takes n * n steps.
_MOST_MARKS = 64
_MARK_SIGNS = "".join(
    sign
    for sign in map(chr, range(0x300, 0x1FC00))
    if unicodedata.combining(unicodedata.normalize("NFKD", sign)[0])
)
_MANY_MARKS = re.compile(f"[{_MARK_SIGNS}]{{{_MOST_MARKS + 1},}}")
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
# Letters that are less alike count beside Latin ones only: whole words of them are of their own script.
_LESS_ALIKE = str.maketrans(
    "\u0433\u0438\u043f\u044c\u044f\u0418\u042f\u04c0\u04cf\u0394\u039b\u03a3"
    "\u03b2\u03b3\u03b4\u03b7\u03b8\u03bc\u03c2\u03c3\u03c7\u03f3",
    "rnnbrNRllAAEbydnoucoxj",
)
_OTHER_LETTERS = re.compile(
    "[\u0131\u0250-\u02af\u0370-\u052f\u1d00-\u1d7f\ua730-\ua7ff\U0001f130-\U0001f1ff]"
)
_WORD = re.compile("[^\\W\\d_]+")
_ESCAPE = re.compile(
    r"\\(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,5})\}|U000([0-9A-Fa-f]{5}))"
)
_LEAST_ESCAPES = 8
_LATIN_WORD = re.compile(r"[A-Za-z]{2}")
_LATIN_WORDS = re.compile(r"[A-Za-z0-9]+")
_LEAST_UNREADABLE = 100  # characters; fewer do not outweigh what stands beside them
_BESIDE = 4000  # characters before and behind an unreadable piece, more than it can outweigh
_MOST_PIECES = 64  # of one kind that are read one by one; the rest are read as one text
_LEAST_LETTERS = 0.6  # letters, spaces and digits of all characters; half of them may be digits
_MOST_DEPTH = 2  # base64 within base64


def read_disguised(text: str, depth: int = 0) -> Iterator[str]:
    """Yield the texts that a text hides, also one within the other.

    Each way of hiding yields at most the length of the text once, or twice where it is read in two ways.
    """
    text, original = fold(text), text
    is_folded = text is not original and _latin_words(text) != _latin_words(original)
    if is_folded:
        yield text
    tokens = words.tokenize(text if is_folded else original).words  # kept from the caller's reading
    num_digits = tokens.count(words.DIGIT)
    pieces = list(_BASE64.finditer(text)) if _LONG_RUN.search(f" {text}") else []
    if depth < _MOST_DEPTH:
        decoded = (_decode(match[0]) for match in pieces)
        has_codes = num_digits >= _LEAST_CODES and _CODES.search(text) is not None
        codes = _read_codes(text) if has_codes else iter(())
        mixed = itertools.islice(_MIXED.finditer(text), _LEAST_MIXED)
        rows = _read_rows(text) if len(list(mixed)) == _LEAST_MIXED else iter(())
        for kind in (decoded, rows, codes, ciphers.read_escapes(text)):
            for inner in _join_many(kind):
                yield inner
                yield from read_disguised(inner, depth + 1)
    if not _TELLING_TOKENS.isdisjoint(tokens):
        yield from _join_many(_join_letters(text, match) for match in _APART.finditer(text))
        if not ciphers.TELLING_WORDS.isdisjoint(tokens):
            yield from _join_many(ciphers.read_exchanged(text))
    if num_digits + text.count("@") + text.count("$") >= ciphers.LEAST_LEET:
        yield from _join_many(ciphers.read_leet(text))
    is_mixed = bool(pieces) or not text.isascii()
    if depth == 0 and is_mixed and _LATIN_WORD.search(rest := _read_beside(text)):
        yield rest


def _latin_words(text: str) -> list[str]:
    return _LATIN_WORDS.findall(text)


def _join_many(texts: Iterator[str | None]) -> Iterator[str]:
    """Yield the first texts, and all others as one: reading many costs no more than reading a long one."""
    hidden_texts = filter(None, texts)
    yield from itertools.islice(hidden_texts, _MOST_PIECES)
    if joined := "\n".join(hidden_texts):
        yield joined


def _join_letters(text: str, match: re.Match[str]) -> str:
    """Return letters that are set apart as words: without the sign between them, or without single spaces."""
    start = match.start()  # at the sign behind the first letter, or before it
    if start and text[start - 1].isalpha() and not text[max(0, start - 2) : start - 1].isalnum():
        start -= 1
    row = text[start : match.end()].lstrip(" \n\t.,;:*|/~+=_-")
    signs = collections.Counter(_SIGN_BETWEEN.findall(row)).most_common(1)
    if signs and signs[0][1] * 3 >= len(row) // 2:  # of half the characters, which are letters
        return row.replace(signs[0][0], "")
    return _GAP.sub("", row)


def normalize(form: Literal["NFC", "NFKD"], text: str) -> str:
    """Return a text in a form of Unicode, at most `_MOST_MARKS` marks in a row."""
    if text.isascii():
        return text
    return unicodedata.normalize(form, _MANY_MARKS.sub(lambda run: run[0][:_MOST_MARKS], text))


def fold(text: str) -> str:
    """Return a text without invisible characters, marks and escapes, and with look-alikes as the letters they mimic."""
    if any(mark in text for mark in ("\\u00", "\\x", "\\u{", "\\U000")):
        escapes = _ESCAPE.findall(text)
        if len(escapes) >= _LEAST_ESCAPES:
            text = _ESCAPE.sub(_unescape, text)
    if text.isascii():
        return text
    plain = text.translate(_TAGS) if _TAG.search(text) else text
    plain = normalize("NFKD", plain)[: 2 * len(text)]
    plain = _SIGNS.sub(_drop_marks, _MARKS.sub("", plain))
    if _OTHER_LETTERS.search(plain):
        plain = re.sub(r"[\U0001f130-\U0001f1ff]+", _fold_word, plain)
        plain = _WORD.sub(_fold_word, plain)
    return text if plain == text else plain


def _fold_word(match: re.Match[str]) -> str:
    """Return a word in Latin letters if its others all look like some; words of other scripts stay as they are."""
    word = match[0]
    if word.isascii():
        return word
    latin = word.translate(_LOOKALIKES)
    if not latin.isascii() and any(sign.isascii() for sign in word):
        latin = latin.translate(_LESS_ALIKE)
    return latin if latin.isascii() else word


def _drop_marks(match: re.Match[str]) -> str:
    """Return nothing for marks of other scripts that are put over a Latin letter."""
    letter = match.string[match.start() - 1 : match.start()]
    is_on_letter = letter.isascii() and letter.isalpha()
    if is_on_letter and all(unicodedata.category(sign)[0] == "M" for sign in match[0]):
        return ""
    return match[0]


def _unescape(match: re.Match[str]) -> str:
    code = int(next(filter(None, match.groups())), 16)
    return "" if 0xD800 <= code <= 0xDFFF else chr(code)  # half of a picture


def _read_beside(text: str) -> str:
    """Return what stands before and behind unreadable pieces, without them; empty if there are few."""
    parts = _UNREADABLE.split(text)
    if len(text) - sum(map(len, parts)) < _LEAST_UNREADABLE:
        return ""
    cut = (p if len(p) <= 2 * _BESIDE else f"{p[:_BESIDE]}\n{p[-_BESIDE:]}" for p in parts)
    return " ".join(cut)


def _read_codes(text: str) -> Iterator[str | None]:
    """Yield the texts that stand as the numbers of their characters, None for rows of other numbers."""
    for match in _HEX_CODES.finditer(text):
        yield _as_words(bytes.fromhex("".join(_HEX_PAIR.findall(match[0]))))
    for match in _DECIMAL_CODES.finditer(text):
        yield _as_words(bytes(map(int, re.findall(r"\d+", match[0]))))
    for match in _BINARY_CODES.finditer(text):
        yield _as_words(_read_bits(re.sub(r"\D", "", match[0])))


def _read_bits(digits: str) -> bytes:
    return bytes(int(digits[start : start + 8], 2) for start in range(0, len(digits), 8))


def _read_rows(text: str) -> Iterator[str | None]:
    """Yield the texts that stand in pieces of base64 or hexadecimal digits, None for rows of other words.

    The first and the last piece that look like no word are known; one more before or behind them may belong to them.
    """
    for row in _ROW.finditer(text):
        pieces = row[0].split()
        for first, last in _find_mixed(pieces):
            if sum(map(len, pieces[first:last])) < _LEAST_SIGNS:
                continue
            spans = ((first, last + 1), (max(0, first - 1), last + 1), (first, last))
            yield next(filter(None, (_decode_block("".join(pieces[a:b])) for a, b in spans)), None)


def _find_mixed(pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield first place and end of each run of pieces that look like no words, but for a few among them."""
    first = end = 0  # no run yet
    for number, piece in enumerate(pieces):
        if _PLAIN_PIECE.fullmatch(piece) is None:
            first, end = first if end else number, number + 1
        elif end and number - end >= _MOST_PLAIN:
            yield first, end
            end = 0
    if end:
        yield first, end


def _decode(piece: str) -> str | None:
    """Return the text that binary or hexadecimal digits, base32 or base64 stand for; None where it is no text.

    Only the last line of a block is shorter; a word at the start of the next line does not belong to it.
    """
    lines = piece.split()
    same = itertools.takewhile(lambda line: len(line) == len(lines[0]), lines)
    num_same = sum(1 for _ in same)
    for num_lines in dict.fromkeys((len(lines), num_same + 1, num_same)):
        text = _decode_block("".join(lines[:num_lines]).rstrip("="))
        if text is not None:
            return text
    return None


def _decode_block(joined: str) -> str | None:
    if _BINARY_CODES.fullmatch(joined):
        return _as_text(_read_bits(joined))
    if _HEXADECIMAL.fullmatch(joined):
        return _as_text(bytes.fromhex(joined))
    if _BASE32.fullmatch(joined) and (text := _as_text(_decode_base32(joined))) is not None:
        return text
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


def _decode_base32(digits: str) -> bytes:
    groups = digits[: len(digits) // 8 * 8] if len(digits) % 8 in (1, 3, 6) else digits
    return base64.b32decode(groups.upper() + "=" * (-len(groups) % 8))


def _as_words(data: bytes) -> str | None:
    """Return the text in some bytes if it has more than one word: many a table has numbers like those of letters."""
    text = _as_text(data)
    return text if text is not None and " " in text.strip() else None


def _as_text(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:  # the piece may have been cut within a letter
        if error.start < len(data) - 4:
            return None
        text = data[: error.start].decode("utf-8")
    text = fold(text)
    num_letters = sum(sign.isalpha() or sign.isspace() for sign in text)
    num_digits = sum(sign.isdecimal() for sign in text)
    is_text = text.replace("\n", "").replace("\t", "").replace("\r", "").isprintable()
    is_text = is_text and num_letters >= _LEAST_LETTERS * len(text) / 2
    is_text = is_text and num_letters + num_digits >= _LEAST_LETTERS * len(text)
    return text if text and is_text else None
