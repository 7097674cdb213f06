"""Segments of prompts: a prompt is cut into segments, and the tokens of each are cached for later prompts.

A tokenizer takes its special tokens out of a text before it looks at anything else, and what stands between two of
them is encoded for itself. So a prompt may be cut there: the turns of a conversation become segments, and of a new
turn under a known system prompt only the turn is encoded. That holds for most tokenizers and not for all (some treat
the beginning of a text specially, some let a special token absorb neighbouring blanks): `is_cutting_exact` tries it.

Within a long segment, tokenizers of the byte-level kind end a word at each line end before a letter. There it may be
cut too, so that the part of a long text that an earlier prompt had is found in the cache.
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
    """Cuts a text at some tokens, like the tokenizer itself: of those that begin at one place, at the longest.

    `at_lines`: long text between them is cut, too, after line ends before letters.
    """

    def __init__(self, tokens: Sequence[str], *, at_lines: bool = False) -> None:
        self.tokens = tokens
        self._at_lines = at_lines
        longest_first = sorted(tokens, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split

    def cut(self, text: str) -> list[str]:
        """Return the segments: tokens, and the texts between them. Joined they are the text; none is empty."""
        cut = [segment for segment in self._cut(text) if segment]
        if not self._at_lines or len(text) < 2 * PART_CHARS:
            return cut
        return [part for segment in cut for part in split_segment(segment)]


def split_segment(segment: str) -> Iterator[str]:
    """Yield a segment in parts of `PART_CHARS` or a little more; segments with equal beginnings have equal parts."""
    start = 0
    while (end := _LINE_END(segment, start + PART_CHARS)) is not None:
        yield segment[start : end.end()]
        start = end.end()
    yield segment[start:]


_LINE_END = re.compile(r"\n(?=[A-Za-z])").search


class SegmentCache:
    """Packed token ids by segment; the least recently used is dropped first, those in `fixed` never."""

    def __init__(self, fixed: Mapping[str, bytes], *, max_bytes: int) -> None:
        self._fixed = fixed
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0

    def find(self, segment: str) -> bytes | None:
        """Return the packed ids of a segment; None if they are not cached."""
        packed = self._fixed.get(segment)
        if packed is None:
            packed = self._entries.get(segment)
            if packed is not None:
                self._entries.move_to_end(segment)
        return packed

    def put(self, segment: str, packed: bytes) -> None:
        """Cache the ids of a segment, unless it is so large that it would displace most others."""
        size = _size(segment, packed)
        if segment in self._entries or size > self._max_bytes // 4:
            return
        self._entries[segment] = packed
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._entries.popitem(last=False))


def is_cutting_exact(cutter: PromptCutter, encode: Callable[[str], bytes]) -> bool:
    """Return whether encoding segment by segment equals encoding the whole, for awkward neighbours of the tokens."""
    tokens = itertools.cycle(cutter.tokens)
    pairs = itertools.product(_AWKWARD, repeat=2)
    texts = [f"{before}{next(tokens)}{after}{next(tokens)}" for before, after in pairs]
    texts += [f"{token}{token}" for token in cutter.tokens[:_MANY]]
    return all(b"".join(map(encode, cutter.cut(text))) == encode(text) for text in texts)


def splits_at_lines(boundaries: Callable[[str], Collection[int]]) -> bool:
    """Return whether a word always begins at a letter after a line end; `boundaries` returns where words begin.

    The patterns of tokenizers distinguish kinds of characters, so all short rows of kinds are tried.
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
