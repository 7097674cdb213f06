"""What a prompt has in common with earlier ones: it is cut into segments, and the tokens of each are kept.

A tokenizer takes its special tokens out of a text before it looks at anything else, and what stands between two of
them is encoded for itself. So a prompt may be cut there: the turns of a conversation become segments, and of a new
turn under a known system prompt only the turn is encoded. That holds for most tokenizers and not for all (some treat
the beginning of a text specially, some let a special token eat the blanks beside it): `agrees` tries it.

Within a long segment, tokenizers of the byte-level kind end a word at each line end before a letter. There it may be
cut too, so that a long text that was asked about before, or has grown since, is known as far as it is the same.
"""

import itertools
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

PART_CHARS = 2048  # of a long segment, at least
_ENTRY_BYTES = 200  # of the table, beside text and tokens
# Beginnings and ends that tokenizers are known to treat specially: blanks, line ends, marks, accents to be composed,
# no-break and ideographic spaces, letters of several bytes, digits, what looks like a special token.
_AWKWARD = (
    "cat",
    " cat ",
    "  two\tcats  ",
    "\n",
    "\n\ncat\r\n \n",
    "don't",
    "'s 12345 ",
    "\u0301e\u0301",
    "\u00a0cat\u3000",
    "你好",
    "👍🏽",
    "▁cat▁",
    "<|cat|>",
    "</s>",
    "Ġ\x00",
)


class PromptCutter:
    """Cuts a text at some tokens, the longest of those that begin at one place, like the tokenizer itself.

    `at_lines`: and what is long between them, after line ends before letters.
    """

    def __init__(self, tokens: Sequence[str], *, at_lines: bool = False) -> None:
        self.tokens = tokens
        self._at_lines = at_lines
        longest_first = sorted(tokens, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split

    def cut(self, text: str) -> list[str]:
        """The segments: tokens, and what stands between them. Joined they are the text; none is empty."""
        cut = [segment for segment in self._cut(text) if segment]
        if not self._at_lines or len(text) < 2 * PART_CHARS:
            return cut
        return [part for segment in cut for part in split_segment(segment)]


def split_segment(segment: str) -> Iterator[str]:
    """A segment in parts of `PART_CHARS` or a little more, the same for segments that begin alike."""
    start = 0
    while (end := _LINE_END(segment, start + PART_CHARS)) is not None:
        yield segment[start : end.end()]
        start = end.end()
    yield segment[start:]


_LINE_END = re.compile(r"\n(?=[A-Za-z])").search


class SegmentCache:
    """Packed token ids by segment; what was used longest ago goes first. `fixed` are kept for ever."""

    def __init__(self, fixed: Mapping[str, bytes], *, max_bytes: int) -> None:
        self._fixed = fixed
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0

    def find(self, segment: str) -> bytes | None:
        """Its packed ids, if they are known."""
        packed = self._fixed.get(segment)
        if packed is None:
            packed = self._kept.get(segment)
            if packed is not None:
                self._kept.move_to_end(segment)
        return packed

    def keep(self, segment: str, packed: bytes) -> None:
        """Remember it; a segment that would push out most others is not worth it."""
        size = _size(segment, packed)
        if segment in self._kept or size > self._max_bytes // 4:
            return
        self._kept[segment] = packed
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._kept.popitem(last=False))


def is_cutting_exact(cutter: PromptCutter, encode: Callable[[str], bytes]) -> bool:
    """Does encoding segment by segment give what encoding the whole gives, for awkward neighbours of the tokens?"""
    some = itertools.cycle(cutter.tokens)
    pairs = itertools.product(_AWKWARD, repeat=2)
    texts = [f"{before}{next(some)}{after}{next(some)}" for before, after in pairs]
    texts += [f"{token}{token}" for token in cutter.tokens[:_MANY]]
    return all(b"".join(map(encode, cutter.cut(text))) == encode(text) for text in texts)


def splits_at_lines(boundaries: Callable[[str], Collection[int]]) -> bool:
    """Does a word always begin at a letter after a line end? `boundaries` tells where the words of a text begin.

    Such patterns know characters by their kinds, so texts of all short rows of kinds are tried.
    """
    sides = [
        "".join(row) for length in range(3) for row in itertools.product(_KINDS, repeat=length)
    ]
    return all(
        len(before) + 1 in boundaries(f"{before}\n{letter}{after}")
        for before in sides
        for letter, after in zip(itertools.cycle("aZs"), ("", *_KINDS, "at", "'s", " a"))
    )


_KINDS = ("a", "Z", "é", "好", "\u0301", "1", "'", ".", "/", "_", " ", "\t", "\n", "\r", "😀")


_MANY = 1000  # some models reserve hundreds of special tokens


def _size(segment: str, packed: bytes) -> int:
    return sys.getsizeof(segment) + sys.getsizeof(packed) + _ENTRY_BYTES
