"""Tokenizers: from text to token ids and back, by the fastest library that is right (`tokenizer_library`).

Ids are packed (`blocks.pack`). Only the segments of a prompt that no earlier prompt had are encoded. A
short text is encoded at once; a long one in a thread, so that other streams go on.

A tokenizer takes its special tokens out of a text before it looks at anything else, and what stands between two of
them is encoded for itself. So a prompt may be cut there: the turns of a conversation become segments, and of a new
turn under a known system prompt only the turn is encoded. That holds for most tokenizers and not for all (some treat
the beginning of a text specially, some let a special token absorb neighbouring blanks): `is_cutting_exact` tries it.
Within a long segment, tokenizers of the byte-level kind end a word at each line end before a letter. There it may be
cut too, so that the part of a long text that an earlier prompt had is found in the cache.
"""

import asyncio
import ctypes
import dataclasses
import functools
import itertools
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

import msgspec

from dynamo.base import errors
from dynamo.preprocess import tokenizer_library
from dynamo.protocols import blocks

CACHE_BYTES = 16 * 2**20  # some sixty prompts of 32,000 tokens
SHORT_TEXT = 512  # characters, which are as quickly encoded as cut and looked up
MAX_BATCH = 2**20  # characters that are encoded together: `tokenizers` needs 100 bytes for each
MAX_THREADS = 2  # that encode long texts: a library uses all cores for each, and keeps 4 to 20 MB for each thread
PART_CHARS = 2048  # of a long segment, at least
MAX_CUTS = 10_000  # of one prompt; what is behind them is encoded as one segment
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
_LINE_END = re.compile(r"\n(?=[A-Za-z])").search
_KINDS = ("a", "Z", "é", "好", "\u0301", "1", "'", ".", "/", "_", " ", "\t", "\n", "\r", "😀")
_MANY = 1000  # some models reserve hundreds of special tokens


class PromptCutter:
    """Cuts a text at some tokens, like the tokenizer itself: of those that begin at one place, at the longest.

    `at_lines`: long text between them is cut, too, after line ends before letters.
    """

    def __init__(self, tokens: Sequence[str], *, at_lines: bool = False) -> None:
        self.tokens = tokens
        self.at_lines = at_lines
        self._cut = re.compile(f"({_match_any(tokens)})").split

    def cut(self, text: str) -> list[str]:
        """Return the segments: tokens, and the texts between them. Joined they are the text; none is empty."""
        cut = [segment for segment in self._cut(text, MAX_CUTS) if segment]
        if not self.at_lines or len(text) < 2 * PART_CHARS:
            return cut
        return [part for segment in cut for part in split_segment(segment)]


def _match_any(texts: Sequence[str]) -> str:
    """Return a pattern of any of these texts, the longest first, that reads what several begin with only once."""
    branches: list[str] = []
    for first, same in itertools.groupby(sorted(texts), lambda text: text[:1]):
        group = list(same)
        pairs = zip(group[0], group[-1], strict=False)
        size = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rests = [text[size:] for text in group]
        branches += [re.escape(group[0][:size]) + _match_any(rests)] if first else []
    pattern = f"(?:{'|'.join(branches)})" if branches else ""
    return f"{pattern}?" if branches and "" in texts else pattern


def split_segment(segment: str) -> Iterator[str]:
    """Yield a segment in parts of `PART_CHARS` or a little more; segments with equal beginnings have equal parts."""
    start = 0
    while (end := _LINE_END(segment, start + PART_CHARS)) is not None:
        yield segment[start : end.end()]
        start = end.end()
    yield segment[start:]


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


def cutting_tokens(added: Sequence[tokenizer_library.AddedToken]) -> list[str]:
    """Return the tokens that are taken out of the raw text; none if one of them changes its neighbours."""
    tokens = [token for token in added if not token.normalized]
    if any(token.lstrip or token.rstrip or token.single_word for token in tokens):
        return []
    return [token.content for token in tokens]


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


def _size(segment: str, packed: bytes) -> int:
    return sys.getsizeof(segment) + sys.getsizeof(packed) + _ENTRY_BYTES


class _Definition(msgspec.Struct, frozen=True):
    """The parts of tokenizer.json that this package reads itself."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None

    @property
    def splits_words(self) -> bool:
        """Return whether it splits a text into words by patterns alone, independent of their place in the text."""
        steps = _steps(self.pre_tokenizer, "pretokenizers")
        return (
            all(step["type"] in _COMPOSING for step in _steps(self.normalizer, "normalizers"))
            and [step["type"] for step in steps[-1:]] == ["ByteLevel"]
            and not steps[-1]["add_prefix_space"]
            and all(
                step["type"] == "Split" and step["behavior"] == "Isolated" for step in steps[:-1]
            )
        )


_COMPOSING = ("NFC", "NFD", "NFKC", "NFKD")  # of letters and the accents after them


def _steps(definition: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a definition; a sequence has its steps under this name."""
    if definition is None:
        return []
    return definition[name] if definition["type"] == "Sequence" else [definition]


class CacheObserver(Protocol):
    """Is informed of the use of a tokenizer's cache."""

    def record_lookup(
        self, *, hits: int, misses: int, cached_tokens: int, uncached_tokens: int
    ) -> None:
        """Record how many segments and tokens of one prompt were in the cache, and how many were not."""
        ...

    def record_times(self, *, template_s: float, tokenize_s: float) -> None:
        """Record the seconds from a conversation to its text, and from there to its tokens."""
        ...


class NoCacheObserver:
    """Ignores the use of a cache."""

    def record_lookup(
        self, *, hits: int, misses: int, cached_tokens: int, uncached_tokens: int
    ) -> None:
        pass

    def record_times(self, *, template_s: float, tokenize_s: float) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class TokenizerOptions:
    """How tokenizers are made, the same for all models of a process."""

    backend: tokenizer_library.LibraryName = "fastokens"
    cache_bytes: int = CACHE_BYTES  # for the tokens of earlier prompts, per model; 0: no cache
    findings: tokenizer_library.FindingsDirectory | None = None  # of earlier loads; None: check


DEFAULT_OPTIONS = TokenizerOptions()


class Tokenizer:
    """One model's tokenizer, shared by all requests. Except for its cache it is immutable."""

    def __init__(
        self,
        definition: bytes,
        options: TokenizerOptions = DEFAULT_OPTIONS,
        *,
        special_tokens: Mapping[str, str] | None = None,
        cache_observer: CacheObserver = NoCacheObserver(),  # noqa: B008 (it has no state)
    ) -> None:
        """`definition` is the content of tokenizer.json. Raises ConfigError.

        `special_tokens` are texts by the names that tokenizer_config.json has for them, such as `eos_token`.
        """
        try:
            text = definition.decode()
            parts = msgspec.json.decode(definition, type=_Definition)
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            raise errors.ConfigError(f"tokenizer.json: expected a JSON object: {error}") from error
        self.special_tokens = special_tokens or {}
        self.cache_observer = cache_observer
        self._threads = futures.ThreadPoolExecutor(MAX_THREADS, "tokenizer")
        self.decoder_definition = parts.decoder or {}  # how tokens become text
        added, findings = self._load(definition, text, parts, options)
        self.num_ids = findings.num_ids
        self.special_ids = frozenset(token.id for token in added if token.special)
        self._cutter = None
        if options.cache_bytes and findings.is_cutting_exact:
            self._cutter = PromptCutter(cutting_tokens(added), at_lines=findings.splits_at_lines)
        self._cache = SegmentCache(
            {name: self._encode(name) for name in self._cutter.tokens} if self._cutter else {},
            max_bytes=options.cache_bytes,
        )

    def encode_now(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the packed ids of each text. Blocks the event loop."""
        packed_ids: list[bytes] = []
        for batch in _batches(texts):
            packed_ids += self.backend.encode(batch, add_special_tokens=add_special_tokens)
        return packed_ids

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the packed ids of each text without blocking the event loop for long."""
        if sum(map(len, texts)) < self.backend.long_text:
            return self.encode_now(texts, add_special_tokens=add_special_tokens)
        encode = functools.partial(self.encode_now, texts, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)

    async def encode_prompt(self, text: str) -> bytes:
        """Return the packed ids of a text with its special tokens, as far as possible from the cache."""
        if len(text) < SHORT_TEXT:
            return self._encode(text)
        if self._cutter is None:
            return (await self.encode([text], add_special_tokens=False))[0]
        cut = self._cutter.cut(text)
        cached = [self._cache.find(segment) for segment in cut]
        new = [segment for segment, packed in zip(cut, cached, strict=True) if packed is None]
        if not new:
            encoded: list[bytes] = []
        elif len(new) == 1 and len(new[0]) < self.backend.long_text:
            encoded = [self._encode(new[0])]
        else:
            encoded = await self.encode(new, add_special_tokens=False)
        return self._join(cached, new, encoded)

    def _join(
        self, cached: list[bytes | None], new: Sequence[str], encoded: Sequence[bytes]
    ) -> bytes:
        """Return all ids in order, and cache those of the `new` segments, which stand at the places of None."""
        for segment, packed in zip(new, encoded, strict=True):
            self._cache.put(segment, packed)
        next_encoded = iter(encoded)
        prompt = b"".join([next(next_encoded) if packed is None else packed for packed in cached])
        num_new = blocks.count(b"".join(encoded))
        self.cache_observer.record_lookup(
            hits=len(cached) - len(new),
            misses=len(new),
            cached_tokens=blocks.count(prompt) - num_new,
            uncached_tokens=num_new,
        )
        return prompt

    def _encode(self, text: str) -> bytes:
        return self.backend.encode([text], add_special_tokens=False)[0]

    def _load(
        self, definition: bytes, text: str, parts: _Definition, options: TokenizerOptions
    ) -> tuple[list[tokenizer_library.AddedToken], tokenizer_library.Findings]:
        """Load the library, and check it unless an earlier load did; return the added tokens. Raises ConfigError."""
        directory = options.findings if options.backend == "fastokens" else None
        findings = directory.find(definition) if directory else None
        if findings is not None and findings.is_fastokens_equal:
            self.backend: tokenizer_library.Library = tokenizer_library.FastokensLibrary(text)
            return tokenizer_library.read_added_tokens(text), findings
        reference = tokenizer_library.HuggingFaceLibrary(text)
        vocabulary = reference.vocabulary()
        self.backend = reference
        if findings is None:
            if options.backend == "fastokens":
                self.backend = tokenizer_library.load_fastest(text, reference)
            findings = self._examine(reference, vocabulary, parts)
            if directory:
                directory.keep(definition, findings)
        return vocabulary.added, findings

    def _examine(
        self,
        reference: tokenizer_library.HuggingFaceLibrary,
        vocabulary: tokenizer_library.Vocabulary,
        parts: _Definition,
    ) -> tokenizer_library.Findings:
        """Return which library encodes, and where prompts may be cut without a change of their ids."""
        normalized = [token.content for token in vocabulary.added if token.normalized]
        cutter = None
        if tokens := cutting_tokens(vocabulary.added):
            at_lines = parts.splits_words and not any("\n" in content for content in normalized)
            cutter = PromptCutter(
                tokens, at_lines=at_lines and splits_at_lines(reference.find_word_starts)
            )
        return tokenizer_library.Findings(
            num_ids=len(vocabulary.tokens),
            is_fastokens_equal=self.backend is not reference,
            is_cutting_exact=cutter is not None and is_cutting_exact(cutter, self._encode),
            splits_at_lines=cutter is not None and cutter.at_lines,
        )

    def cut_end(self, packed: bytes, num_tokens: int) -> bytes:
        """Return at most so many packed ids of a text, with the special one behind them, if there is one."""
        size, last = num_tokens * blocks.TOKEN_BYTES, packed[-blocks.TOKEN_BYTES :]
        if len(packed) <= size:
            return packed
        end = last if self.special_ids.issuperset(blocks.unpack(last)) else b""
        return packed[: size - len(end)] + end

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of these tokens together; ids that do not exist are skipped."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_of(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; an id that does not exist has an empty token."""
        return self.backend.token_of(token_id)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token that is spelled as in the vocabulary; None if there is none."""
        return self.backend.id_of(token)


def return_freed_memory() -> None:
    """Give memory back to the operating system that the C library keeps: a load leaves 20 to 30 MB."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts in batches of at most `MAX_BATCH` characters, or of a single longer text."""
    begin, num_chars = 0, 0
    for end, text in enumerate(texts):
        if num_chars + len(text) > MAX_BATCH and end > begin:
            yield texts[begin:end]
            begin, num_chars = end, 0
        num_chars += len(text)
    yield texts[begin:]
