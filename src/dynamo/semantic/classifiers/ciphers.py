"""Texts in another spelling: letters exchanged (ROT13, Caesar, Atbash), reversed, written with digits, and escaped.

A cipher is known by its commonest words: "gur" is "the" in ROT13, and no English word. A stretch of a text is read by a
cipher if at least two such words stand close together in it and outnumber the common words of plain English; only the
stretch is read, so the readings are hardly longer than the text. A text without such words costs one look at each word,
and one without digits or signs to be read as letters next to nothing.
"""  # decider

import bisect
import html
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from urllib import parse

# Of these many are in every English text, and some in every order to a model.
_COMMON_WORDS = """
the and you your are not this that with will all any have has from for was were what when who which how can could
should would must may never always only just now then there here they them their his her she him its our out about
into over under before after above below been being does done but because than more most some such each every other
same where while until unless without within between also too very even still again yes please
ignore forget disregard override bypass previous prior instructions instruction rules rule guidelines restrictions
restriction limitations limits filters policies policy ethical ethics moral safety system prompt prompts reveal show
print repeat output tell display leak write answer answers respond response act pretend mode developer jailbreak
unfiltered uncensored anything anyone everything nothing something refuse refused decline comply obey follow
character roleplay role play user model assistant chatgpt openai language simulate freed free freely break
warning illegal harmful dangerous content request question secret hidden password say use make give want need know
like one two new first last people person story world good bad word words text code access information
message messages instead simply stay start begin end regardless provide generate explain describe create allowed
"""
COMMON_WORDS = frozenset(_COMMON_WORDS.split())
# Those, and ciphers of them that are words or names, too.
_PLAIN_WORDS = COMMON_WORDS | frozenset(
    "saw bar won dna era exp ton zoo jung tub ure fur sih dab qtl nac clo iru vgf did".split()  # noqa: SIM905
)
_LETTERS = string.ascii_lowercase
_WORD = re.compile(r"[^\W\d_]+")
_BESIDE = 60  # characters before and behind the words that tell a cipher, which are read with them
_LEAST_WORDS = 2  # different words that tell a cipher

_LEET_SIGNS = "0134567@$89"
_LEET_LETTERS = "oieasgtasbg"
_LEET = str.maketrans(_LEET_SIGNS + "!|2", _LEET_LETTERS + "ilz")
_LEET_WITH_L = _LEET | {ord("1"): "l"}
_LEET_NEAR_LETTER = re.compile(r"[0134567@$89](?:(?<=[A-Za-z].)|(?=[A-Za-z]))")
_LEET_RUN = re.compile(r"[A-Za-z0-9@$!|]+")
_MOST_LEET = 30  # signs of a word that is looked up
LEAST_LEET = 3  # such digits and signs in a text

_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}|&#[0-9A-Fa-fxX]{2,7};?")
_LETTER = re.compile("[0-9A-Za-z]")
_NO_CHARACTER = "\ufffd"  # what decoding puts in the place of bytes that are no UTF-8
_ENDLESS_CODE = re.compile(r"&#\d{4000,};?")
_LEAST_ESCAPES = 3
_MOST_UNESCAPED = 3  # times, one within the other


Cipher = Callable[[str], tuple[str, ...]]


def _exchange_letters(letters: str) -> Cipher:
    """Return what reads a text in which these letters stand for a, b, c, ..."""
    table = str.maketrans(letters + letters.upper(), _LETTERS + _LETTERS.upper())
    return lambda text: (text.translate(table),)


def _read_reversed(text: str) -> tuple[str, ...]:
    """Return a text backwards, and with each word backwards in its place."""
    return text[::-1], _WORD.sub(lambda word: word[0][::-1], text)


_ALPHABETS = (  # what stands for a, b, c, ...: by ROT13, Caesar and Atbash
    *(_LETTERS[shift:] + _LETTERS[:shift] for shift in (13, 3, 23)),
    _LETTERS[::-1],
)
_CIPHERS: tuple[Cipher, ...] = (*map(_exchange_letters, _ALPHABETS), _read_reversed)
# The words that tell a cipher, each with the cipher's number: each of the ciphers here, or its opposite, undoes itself.
_OPPOSITES = (0, 2, 1, 3, 4)
_CIPHER_BY_WORD = {
    enciphered: number
    for number, opposite in enumerate(_OPPOSITES)
    for word in COMMON_WORDS
    if (enciphered := _CIPHERS[opposite](word)[0]) not in _PLAIN_WORDS
}
TELLING_WORDS = frozenset(_CIPHER_BY_WORD)


@dataclass(slots=True)
class _Stretch:
    """A part of a text in which words that tell a cipher stand close together."""

    cipher: int
    start: int  # characters
    end: int
    num_words: int = 0
    num_plain: int = 0  # common words of plain English between them
    distinct_words: set[str] = field(default_factory=set)

    @property
    def is_cipher(self) -> bool:
        """Return whether the words are enough to tell the cipher."""
        return len(self.distinct_words) >= _LEAST_WORDS and self.num_words > self.num_plain


def undo_escapes(text: str) -> tuple[str, ...]:
    """Return what a text says whose escapes are those that addresses and pages need, also with `+` as a space.

    Letters and digits need none: a text that escapes them, or escapes its escapes again and again, is returned as it
    is, because its spelling says more than its words.
    """
    if "%" not in text and "&#" not in text:
        return (text,)
    words = re.split(r"(\s)", text) if "+" in text else [text]
    spaced = "".join(word.replace("+", " ") if "%" in word else word for word in words)
    readings = (_undo_needed(text), _undo_needed(spaced))
    return tuple(dict.fromkeys(text if plain is None else plain for plain in readings))


def _undo_needed(text: str) -> str | None:
    """Return the text without its escapes; None if one stands for a letter or a digit, or for no character.

    What stands for none may be a word behind a sign: `%DAN`.
    """
    for _ in range(_MOST_UNESCAPED + 1):
        signs = "".join(map(_unescape, set(_ESCAPE.findall(text))))
        if _LETTER.search(signs):
            return None
        plain = parse.unquote(_unescape_page(text))
        if plain.count(_NO_CHARACTER) > text.count(_NO_CHARACTER):
            return None
        if plain == text:
            return text
        text = plain
    return None


def read_escapes(text: str) -> Iterator[str]:
    """Yield the stretches of a text in which signs are written as in addresses (`%41`) or pages (`&#65;`)."""
    if "%" not in text and "&#" not in text:
        return
    spans = [match.span() for match in _ESCAPE.finditer(text)]
    for start, end, number in _join_spans(spans):
        if number >= _LEAST_ESCAPES:
            yield _unescape(text[max(0, start - _BESIDE) : end + _BESIDE])


def _unescape_page(text: str) -> str:
    """Return a text without the escapes of pages; a number that Python does not read stands for no character."""
    return html.unescape(_ENDLESS_CODE.sub(_NO_CHARACTER, text))


def _unescape(piece: str) -> str:
    for _ in range(_MOST_UNESCAPED):
        if "%" in piece:
            piece = piece.replace("+", " ")
        plain = parse.unquote(_unescape_page(piece))
        if plain == piece:
            break
        piece = plain
    return piece


def read_exchanged(text: str) -> Iterator[str]:
    """Yield what the stretches with words that tell a cipher say by it; of several ciphers the one with the most words.

    A text without one of `TELLING_WORDS` has none.
    """
    is_used = bytearray(len(text))  # a byte for each character
    stretches = (stretch for stretch in _find_stretches(text) if stretch.is_cipher)
    for stretch in sorted(stretches, key=lambda stretch: -stretch.num_words):
        if is_used.find(1, stretch.start, stretch.end) < 0:
            is_used[stretch.start : stretch.end] = b"\x01" * (stretch.end - stretch.start)
            piece = text[max(0, stretch.start - _BESIDE) : stretch.end + _BESIDE]
            yield from _CIPHERS[stretch.cipher](piece)


def _find_stretches(text: str) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    last: dict[int, _Stretch] = {}  # by cipher
    plain: list[int] = []  # where common words begin
    for match in _WORD.finditer(text):
        word = match[0].lower()
        cipher = _CIPHER_BY_WORD.get(word)
        if cipher is None:
            if word in COMMON_WORDS:
                plain.append(match.start())
            continue
        stretch = last.get(cipher)
        if stretch is None or match.start() - stretch.end > 2 * _BESIDE:
            stretch = last[cipher] = _Stretch(cipher, match.start(), match.end())
            stretches.append(stretch)
        stretch.end = match.end()
        stretch.num_words += 1
        stretch.distinct_words.add(word)
    for stretch in stretches:
        before = bisect.bisect_left(plain, stretch.start)
        stretch.num_plain = bisect.bisect_left(plain, stretch.end) - before
    return stretches


def read_leet(text: str) -> Iterator[str]:
    """Yield what stretches say in letters that have common words with digits and signs in place of some letters."""
    spans = [span for span in _find_leet_runs(text) if _is_leet(text[slice(*span)])]
    for start, end, number in _join_spans(spans):
        if number >= _LEAST_WORDS:
            piece = text[max(0, start - _BESIDE) : end + _BESIDE]
            yield _LEET_RUN.sub(lambda run: _read_leet_word(run[0]), piece)


def _find_leet_runs(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of letters and signs with a sign beside a letter."""
    end = 0
    for match in _LEET_NEAR_LETTER.finditer(text):
        if match.start() < end:
            continue
        start = max(end, match.start() - _MOST_LEET)
        run: re.Match[str] | None = None
        for run in _LEET_RUN.finditer(text, start, match.end() + _MOST_LEET):
            if run.end() > match.start():
                break
        if run is not None:
            end = run.end()
            yield run.span()


def _is_leet(run: str) -> bool:
    return 3 <= len(run.strip("!|")) <= _MOST_LEET and _read_leet_word(run) in COMMON_WORDS


def _read_leet_word(run: str) -> str:
    """Return a word in letters; `1` is an i, or an l where that gives a common word."""
    run = run.rstrip("!|").lower()
    with_l = run.translate(_LEET_WITH_L)
    return with_l if with_l in COMMON_WORDS else run.translate(_LEET)


def _join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the start and end of stretches of spans that are close to each other, with the number of spans."""
    joined: list[tuple[int, int, int]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] <= 2 * _BESIDE:
            first, _, number = joined[-1]
            joined[-1] = (first, end, number + 1)
        else:
            joined.append((start, end, 1))
    return joined
