"""From text to token ids and back: the door to Hugging Face's `tokenizers`.

Ids leave packed (`blocks.pack`). Of a prompt only what no earlier prompt had is encoded (`segments`). A short text is
encoded on the spot; a long one in a thread, so that the streams of others go on: `encode_batch_fast` releases the
interpreter lock, which `encode` holds.
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
    """What we read in tokenizer.json ourselves."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None

    @property
    def splits_words(self) -> bool:
        """Does it cut a text by patterns into words, and leave the rest of it as it is, wherever it stands?"""
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
    """What a definition consists of; a sequence has its steps under this name."""
    if definition is None:
        return []
    return definition[name] if definition["type"] == "Sequence" else [definition]


class CacheObserver(Protocol):
    """Who wants to know what the cache was good for."""

    def record_lookup(
        self, *, hits: int, misses: int, cached_tokens: int, uncached_tokens: int
    ) -> None:
        """The segments of one prompt, and their tokens, that were known and that were not."""
        ...


class NoCacheObserver:
    """Nobody does."""

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
        self.tokens = _by_id(self._tokenizer.get_vocab())  # as the vocabulary writes them

    @property
    def num_ids(self) -> int:
        """Ids are below this."""
        return len(self.tokens)

    def encode_now(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Packed ids of each text."""
        made: list[bytes] = []
        for batch in _batches(texts):
            found = self._tokenizer.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
            made += [blocks.pack(encoding.ids) for encoding in found]
        return made

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Packed ids of each text, without stopping the event loop for long."""
        if sum(map(len, texts)) < LONG_TEXT:
            return self.encode_now(texts, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.encode_now, texts, add_special_tokens=add_special_tokens
        )

    async def encode_prompt(self, text: str) -> bytes:
        """Packed ids of a text that has its special tokens in it, as far as possible from earlier prompts."""
        if self._cutter is None or len(text) < SHORT_TEXT:
            return (await self.encode([text], add_special_tokens=False))[0]
        cut = self._cutter.cut(text)
        found = [self._cache.find(segment) for segment in cut]
        new = [segment for segment, packed in zip(cut, found, strict=True) if packed is None]
        if not new:
            made: list[bytes] = []
        elif len(new) == 1 and len(new[0]) < LONG_TEXT:
            made = [self._encode(new[0])]
        else:
            made = await self.encode(new, add_special_tokens=False)
        return self._join(found, new, made)

    def _join(self, found: list[bytes | None], new: Sequence[str], made: Sequence[bytes]) -> bytes:
        """All ids in order, where `made` stands in for what was not found; that is kept, and counted."""
        for segment, packed in zip(new, made, strict=True):
            self._cache.keep(segment, packed)
        rest = iter(made)
        whole = b"".join([next(rest) if packed is None else packed for packed in found])
        num_new = blocks.count(b"".join(made))
        self._cache_observer.record_lookup(
            hits=len(found) - len(new),
            misses=len(new),
            cached_tokens=blocks.count(whole) - num_new,
            uncached_tokens=num_new,
        )
        return whole

    def _encode(self, text: str) -> bytes:
        return blocks.pack(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _find_cutter(
        self, added: Sequence[tokenizers.AddedToken], parts: _Definition
    ) -> segments.PromptCutter | None:
        """Cuts at the tokens that the tokenizer takes out of the text as it came; None if that changes anything."""
        tokens = [token for token in added if not token.normalized]
        if not tokens or any(one.lstrip or one.rstrip or one.single_word for one in tokens):
            return None
        others = [token.content for token in added if token.normalized]
        at_lines = parts.splits_words and not any("\n" in one for one in others)
        cutter = segments.PromptCutter(
            [token.content for token in tokens],
            at_lines=at_lines and segments.splits_at_lines(self._word_starts),
        )
        return cutter if segments.is_cutting_exact(cutter, self._encode) else None

    def _word_starts(self, text: str) -> list[int]:
        """Where the parts begin that the tokenizer's model sees one at a time."""
        words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [start for _, (start, _) in words]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all these tokens together; ids that do not exist count for nothing."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        return self._tokenizer.token_to_id(token)


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """All texts in turn, so that those of one batch are not too long together, unless it is a single one."""
    begin, num_chars = 0, 0
    for end, text in enumerate(texts):
        if num_chars + len(text) > MAX_BATCH and end > begin:
            yield texts[begin:end]
            begin, num_chars = end, 0
        num_chars += len(text)
    yield texts[begin:]


def _by_id(vocabulary: dict[str, int]) -> list[str]:
    """Tokens in the order of their ids; an id that does not exist has an empty one."""
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens
