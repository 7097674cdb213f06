"""What a prompt has in common with earlier ones: it is cut into segments, and the tokens of each are kept.

A tokenizer takes its special tokens out of a text before it looks at anything else, and what stands between two of
them is encoded for itself. So a prompt may be cut there: the turns of a conversation become segments, and of a new
turn under a known system prompt only the turn is encoded. That holds for most tokenizers and not for all (some treat
the beginning of a text specially, some let a special token eat the blanks beside it): `agrees` tries it.
"""

import itertools
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

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


class Cutter:
    """Cuts a text at some tokens, the longest of those that begin at one place, like the tokenizer itself."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens
        longest_first = sorted(tokens, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split

    def cut(self, text: str) -> list[str]:
        """The segments: tokens, and what stands between them. Joined they are the text; none is empty."""
        return [segment for segment in self._cut(text) if segment]


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


def agrees(cutter: Cutter, encode: Callable[[str], bytes]) -> bool:
    """Does encoding segment by segment give what encoding the whole gives, for awkward neighbours of the tokens?"""
    some = itertools.cycle(cutter.tokens)
    pairs = itertools.product(_AWKWARD, repeat=2)
    texts = [f"{before}{next(some)}{after}{next(some)}" for before, after in pairs]
    texts += [f"{token}{token}" for token in cutter.tokens[:_MANY]]
    return all(b"".join(map(encode, cutter.cut(text))) == encode(text) for text in texts)


_MANY = 1000  # some models reserve hundreds of special tokens


def _size(segment: str, packed: bytes) -> int:
    return sys.getsizeof(segment) + sys.getsizeof(packed) + _ENTRY_BYTES
