"""Tokenizers: from text to token ids and back, by Hugging Face's `tokenizers`, which only this module imports.

Ids are packed (`blocks.pack`). Only the segments of a prompt that no earlier prompt had are encoded (`segments`). A
short text is encoded at once; a long one in a thread, so that other streams go on: `encode_batch_fast` releases
the interpreter lock, which `encode` holds.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import tokenizers

from dynamo.base import errors
from dynamo.preprocess import segments
from dynamo.protocols import blocks

CACHE_BYTES = 16 * 2**20  # some sixty prompts of 32,000 tokens
SHORT_TEXT = 512  # characters, which are as quickly encoded as cut and looked up
LONG_TEXT = 4096  # characters, about 2 ms of work
MAX_BATCH = 2**20  # characters that are encoded together: the library needs 100 bytes for each


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


class NoCacheObserver:
    """Ignores the use of a cache."""

    def record_lookup(
        self, *, hits: int, misses: int, cached_tokens: int, uncached_tokens: int
    ) -> None:
        pass


class Tokenizer:
    """One model's tokenizer, shared by all requests. Except for its cache it is immutable."""

    def __init__(
        self,
        definition: bytes,
        *,
        cache_bytes: int = CACHE_BYTES,
        cache_observer: CacheObserver = NoCacheObserver(),  # noqa: B008 (it has no state)
    ) -> None:
        """`definition` is the content of tokenizer.json; `cache_bytes` 0: no cache. Raises ConfigError."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition.decode())
            parts = msgspec.json.decode(definition, type=_Definition)
        except Exception as error:  # the library raises bare Exceptions
            raise errors.ConfigError(
                f"tokenizer.json: expected a definition that tokenizers {tokenizers.__version__} "
                f"can read: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._cache_observer = cache_observer
        self._cutter = self._find_cutter(list(added.values()), parts) if cache_bytes else None
        self._cache = segments.SegmentCache(
            {name: self._encode(name) for name in self._cutter.tokens} if self._cutter else {},
            max_bytes=cache_bytes,
        )
        self.decoder_definition = parts.decoder or {}  # how tokens become text
        vocabulary = self._tokenizer.get_vocab()
        # By id, as the vocabulary writes them; an id that does not exist has an empty one.
        self.tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            self.tokens[token_id] = token

    @property
    def num_ids(self) -> int:
        """Return the number of ids, all of which are below it."""
        return len(self.tokens)

    def encode_now(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the packed ids of each text. Blocks the event loop."""
        packed_ids: list[bytes] = []
        for batch in _batches(texts):
            encodings = self._tokenizer.encode_batch_fast(
                batch, add_special_tokens=add_special_tokens
            )
            packed_ids += [blocks.pack(encoding.ids) for encoding in encodings]
        return packed_ids

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the packed ids of each text without blocking the event loop for long."""
        if sum(map(len, texts)) < LONG_TEXT:
            return self.encode_now(texts, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.encode_now, texts, add_special_tokens=add_special_tokens
        )

    async def encode_prompt(self, text: str) -> bytes:
        """Return the packed ids of a text with its special tokens, as far as possible from the cache."""
        if self._cutter is None or len(text) < SHORT_TEXT:
            return (await self.encode([text], add_special_tokens=False))[0]
        cut = self._cutter.cut(text)
        cached = [self._cache.find(segment) for segment in cut]
        new = [segment for segment, packed in zip(cut, cached, strict=True) if packed is None]
        if not new:
            encoded: list[bytes] = []
        elif len(new) == 1 and len(new[0]) < LONG_TEXT:
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
        self._cache_observer.record_lookup(
            hits=len(cached) - len(new),
            misses=len(new),
            cached_tokens=blocks.count(prompt) - num_new,
            uncached_tokens=num_new,
        )
        return prompt

    def _encode(self, text: str) -> bytes:
        return blocks.pack(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _find_cutter(
        self, added: Sequence[tokenizers.AddedToken], parts: _Definition
    ) -> segments.PromptCutter | None:
        """Return a cutter at the tokens that are taken out of the raw text; None if cutting changes the ids."""
        tokens = [token for token in added if not token.normalized]
        if not tokens or any(token.lstrip or token.rstrip or token.single_word for token in tokens):
            return None
        normalized = [token.content for token in added if token.normalized]
        at_lines = parts.splits_words and not any("\n" in content for content in normalized)
        cutter = segments.PromptCutter(
            [token.content for token in tokens],
            at_lines=at_lines and segments.splits_at_lines(self._word_starts),
        )
        return cutter if segments.is_cutting_exact(cutter, self._encode) else None

    def _word_starts(self, text: str) -> list[int]:
        """Return where the parts begin that the tokenizer's model encodes one at a time."""
        words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [start for _, (start, _) in words]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of these tokens together; ids that do not exist are skipped."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, written as in the vocabulary; None if there is none."""
        return self._tokenizer.token_to_id(token)


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts in batches of at most `MAX_BATCH` characters, or of a single longer text."""
    begin, num_chars = 0, 0
    for end, text in enumerate(texts):
        if num_chars + len(text) > MAX_BATCH and end > begin:
            yield texts[begin:end]
            begin, num_chars = end, 0
        num_chars += len(text)
    yield texts[begin:]
