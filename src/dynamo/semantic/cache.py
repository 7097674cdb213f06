"""The semantic cache: answers given again to the same question in other words.

A wrong hit is worse than a miss. So everything but the last user text is compared exactly (tenant, requested model,
system prompt, earlier messages, tools, response format, sampling), and of that text all words that carry meaning
(`question_meaning`): numbers, names, negations, opposites, operators. What is left to compare is one key of a
dictionary and one pair of questions, so a search costs the same at any size.

Embeddings are not used: two questions that differ in a number or a negation are as similar as rephrasings.
"""  # decider

import collections
import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.semantic import answer_usage, config, immediate, question_meaning, request_view

MAX_TEXT = 20_000  # characters of a question that is cached
DELETE_HEADER = "x-vsr-cache-delete"  # names of entries to delete before the request is answered
MAX_BODY = 2**20  # bytes of an answer that is cached
_EXPLAIN_HEADER = "x-dynamo-explain"  # the answer explains how this very request was served
_MOST_DELETED = 100
_DIGEST_BYTES = 16
# Indented lines, quotes beside operators and brackets, factorials: there the signs say what the words do not.
_CODE = re.compile(
    r"\n[ \t]+\S|[-+*/%=<>(){}\[\]]\s?[\"'`]|[\"'`]\s?[-+*/%=<>(){}\[\]]|[\d)]!\s?[-+*/^=)?]"
)
STREAM_TYPES = (immediate.EVENT_STREAM, "application/x-ndjson")  # the second is Ollama's
_FREE_FIELDS = frozenset({"stream", "stream_options", "user", "metadata", "store"})
# What decoding raises for an answer that is no completion.
_UNREADABLE = (
    *(msgspec.DecodeError, UnicodeDecodeError, RecursionError),
    *(KeyError, TypeError, AttributeError),
)
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")  # of an answer
_SIDE_EFFECTS = (
    *("tools", "functions", "seed", "previous_response_id", "nvext", "echo"),
    *("logprobs", "prompt_logprobs", "return_token_ids"),  # of tokens a stored answer says nothing
)


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What two requests must share to share an answer, and the meaning of the question."""

    digest: bytes  # of all that is compared exactly, and of the question's words in any order
    tenant: str
    meaning: question_meaning.QuestionMeaning
    decision: str = ""  # which has chosen model and system prompt by the very words

    @property
    def name(self) -> str:
        """Return the name that callers know the entry by."""
        return self.digest.hex()


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A stored answer, and how similar its question was."""

    body: bytes
    similarity: float


@dataclass(slots=True)
class StoredAnswer:
    """An answer in the cache, with the key of its question."""

    key: CacheKey
    body: bytes
    expires_at: float
    num_hits: int = 0


@request_view.refuse_deep_values()
def make_key(
    view: request_view.RequestView, headers: Mapping[str, str], tenant: str
) -> CacheKey | None:
    """Return the key of a request; None if its answer must not come from a cache. Raises InvalidRequest."""
    directives = headers.get("cache-control", "").lower()
    if "no-cache" in directives or "no-store" in directives or "x-vsr-skip-cache" in headers:
        return None
    if _EXPLAIN_HEADER in headers:
        return None
    is_plain = view.messages_field == "messages" and view.last_user == len(view.messages) - 1
    text = view.user_text
    if not is_plain or view.has_images or not 0 < len(text) <= MAX_TEXT:
        return None
    values = map(view.fields.get, _SIDE_EFFECTS)
    if any(value is not None and value is not False for value in values):
        return None
    if view.fields.get("n") not in (None, 1):
        return None
    fields = {k: v for k, v in view.fields.items() if k not in _FREE_FIELDS and k != "messages"}
    last = {k: v for k, v in view.messages[-1].items() if k != "content"}
    other_parts = _other_parts(view.messages[-1].get("content"))
    meaning = question_meaning.read_meaning(text)
    code = text if _CODE.search(text) else ""
    written = [code, question_meaning.read_signs(text), question_meaning.read_material(text)]
    exact = [tenant, fields, view.messages[:-1], last, other_parts, *written, *meaning.key]
    digest = hashlib.blake2b(
        msgspec.json.encode(exact, order="deterministic"), digest_size=_DIGEST_BYTES
    )
    return CacheKey(digest.digest(), tenant, meaning)


def _other_parts(content: Any) -> list[Any]:
    """Return the parts of a message that are more than a text: sounds, films, files."""
    parts = content if isinstance(content, list) else []
    return [part for part in parts if not _is_text_part(part)]


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"


def names_to_delete(headers: Mapping[str, str]) -> list[str]:
    """Return the names of the cached answers that a request asks to delete."""
    names = headers.get(DELETE_HEADER, "").split(",")[:_MOST_DELETED]
    return [name.strip() for name in names if name.strip()]


def read_name(name: str) -> bytes | None:
    """Return the digest of an entry that callers know by this name; None for a name of none."""
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return digest if len(digest) == _DIGEST_BYTES else None


def similarity(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """Return the cosine of two sets of weighted words, 0 to 1."""
    product = sum(count * b.get(word, 0.0) for word, count in a.items())
    norms = sum(n * n for n in a.values()) * sum(n * n for n in b.values())
    return min(1.0, product / math.sqrt(norms)) if norms else 0.0


Mutex = contextlib.AbstractContextManager[object]
UNSHARED: Mutex = contextlib.nullcontext()  # for a cache of one thread
OnChange = Callable[[bytes, StoredAnswer | None], None]


class SemanticCache:
    """Answers by question, bounded in entries, bytes and time."""

    def __init__(
        self,
        settings: config.CacheSettings,
        clock: clocks.Clock,
        mutex: Mutex = UNSHARED,
    ) -> None:
        """`mutex` is held while the entries change: large bodies are routed in a thread. It must be reentrant."""
        self._mutex = mutex
        self.settings = settings
        self._clock = clock
        self._entries: collections.OrderedDict[bytes, StoredAnswer] = collections.OrderedDict()
        self._num_bytes = 0
        self.on_change: OnChange | None = None  # gets what is stored and removed

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all stored answers."""
        return self._num_bytes

    def find(self, key: CacheKey, threshold: float) -> CacheHit | None:
        """Return the answer to a question of the same meaning whose words are as similar as the threshold asks."""
        with self._mutex:
            entry = self._entries.get(key.digest)
            if entry is None:
                return None
            if self._clock.now() >= entry.expires_at:
                self.remove(key.digest)
                return None
            score = similarity(key.meaning.weights, entry.key.meaning.weights)
            is_same = entry.key.decision == key.decision and score >= threshold
            if not (is_same and key.meaning.agrees_with(entry.key.meaning)):
                return None
            entry.num_hits += 1
            if self.settings.eviction_policy == "lru":
                self._entries.move_to_end(key.digest)
            return CacheHit(entry.body, score)

    def answers(self) -> Iterable[tuple[bytes, StoredAnswer]]:
        """Return the stored answers by their digests, in the order in which they would be given up."""
        with self._mutex:
            return list(self._entries.items())

    def has(self, key: CacheKey) -> bool:
        """Return whether an answer is stored under the key, whatever its question says."""
        entry = self._entries.get(key.digest)
        return entry is not None and self._clock.now() < entry.expires_at

    def store(self, key: CacheKey, body: bytes, ttl_s: float | None = None) -> bool:
        """Store a complete answer and return True; one that is cut off, refused or too large is not kept."""
        ttl_s = (
            self.settings.ttl_seconds if ttl_s is None else min(ttl_s, self.settings.ttl_seconds)
        )
        if len(body) > MAX_BODY or ttl_s <= 0 or not _is_complete(body):
            return False
        entry = StoredAnswer(key, body, self._clock.now() + ttl_s)
        most_bytes = self.settings.max_megabytes * 2**20
        with self._mutex:
            self.remove(key.digest)
            self._entries[key.digest] = entry
            if self.on_change is not None:
                self.on_change(key.digest, entry)
            self._num_bytes += len(body)
            while len(self._entries) > self.settings.max_entries or self._num_bytes > most_bytes:
                self.remove(self._victim(key.digest))
        return True

    def invalidate(self, tenant: str | None = None) -> int:
        """Remove the answers of a tenant, or all; return their number."""
        digests = [d for d, e in self.answers() if tenant is None or e.key.tenant == tenant]
        for digest in digests:
            self.remove(digest)
        return len(digests)

    def delete(self, name: str, tenant: str) -> bool:
        """Remove the answer of a name that its tenant was given, and return whether there was one."""
        digest = read_name(name)
        entry = None if digest is None else self._entries.get(digest)
        if entry is None or entry.key.tenant != tenant:
            return False
        self.remove(entry.key.digest)
        return True

    def _victim(self, newest: bytes) -> bytes:
        """Return the entry to give up: the oldest, or with `lfu` the one with the fewest hits."""
        if self.settings.eviction_policy == "lfu" and len(self._entries) > 1:
            others = (digest for digest in self._entries if digest != newest)
            return min(others, key=lambda digest: self._entries[digest].num_hits)
        return next(iter(self._entries))

    def remove(self, digest: bytes) -> None:
        """Remove the answer of a digest, if there is one."""
        with self._mutex:
            entry = self._entries.pop(digest, None)
            if entry is not None:
                self._num_bytes -= len(entry.body)
                if self.on_change is not None:
                    self.on_change(digest, None)


def _is_complete(body: bytes) -> bool:
    """Return whether the body is a completion with choices that all ended by themselves."""
    try:
        completion = msgspec.json.decode(body)
        choices = completion["choices"]
        return bool(choices) and all(
            choice["finish_reason"] == "stop" and _is_plain(choice, choice["message"])
            for choice in choices
        )
    except _UNREADABLE:
        return False


def _is_plain(choice: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Return whether a choice is a text and no more.

    Some servers send a list of parts, and models call tools, refuse and speak.
    """
    is_text = all(isinstance(message.get(name) or "", str) for name in _TEXT_FIELDS)
    filled = {name for name, value in message.items() if value}
    return is_text and isinstance(choice["index"], int) and filled <= {"role", *_TEXT_FIELDS}


def _find_data(event: bytes) -> bytes:
    """Return the data of an event; nothing for one without."""
    lines = event.strip().split(b"\n")
    return next((line[5:] for line in lines if line.startswith(b"data:")), b"")


def make_recorder(content_type: str, *, keeps_text: bool) -> "StreamRecorder | None":
    """Return what follows an answer of this type; None if it is no stream."""
    if not content_type.startswith(STREAM_TYPES):
        return None
    is_lines = not content_type.startswith(immediate.EVENT_STREAM)
    return StreamRecorder(keeps_text=keeps_text and not is_lines, is_lines=is_lines)


class StreamRecorder:
    """Joins the events of a streamed answer into the body that the whole answer would have had."""

    def __init__(self, *, keeps_text: bool = True, is_lines: bool = False) -> None:
        """Without `keeps_text` only the usage is read; `is_lines`: each line is JSON, as Ollama streams."""
        self._is_lines = is_lines
        self._buffer = b""
        self._num_bytes = 0
        self._head: dict[str, object] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}  # by choice and field
        self.usage: dict[str, Any] = {}  # what the answer has reported
        self._finish: dict[int, str] = {}
        self._is_done = False
        self._is_plain = keeps_text

    def feed(self, data: bytes) -> None:
        """Take a piece of the stream, cut anywhere."""
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BODY * 8:
            self._is_plain = False
            self._texts.clear()  # the usage comes last
        # a server may end its lines in either way
        separator = b"\n" if self._is_lines else b"\n\n"
        *events, self._buffer = (self._buffer + data).replace(b"\r\n", b"\n").split(separator)
        for event in events:
            self._take(event if self._is_lines else _find_data(event))
        if len(self._buffer) > MAX_BODY:  # of this event nothing is known any more
            self._buffer, self._is_plain = b"", False
            self._texts.clear()

    def body(self) -> bytes | None:
        """Return the whole answer; None if the stream was cut off or carried more than text."""
        if not (self._is_done and self._is_plain and self._texts):
            return None
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **self._message(index)},
                "finish_reason": self._finish.get(index),
            }
            for index in sorted({index for index, _ in self._texts})
        ]
        usage = self.usage or immediate.NO_USAGE
        return msgspec.json.encode(
            {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}
        )

    def _message(self, index: int) -> dict[str, str]:
        return {name: "".join(texts) for (n, name), texts in self._texts.items() if n == index}

    def _take(self, value: bytes) -> None:
        if not value or not (self._is_plain or any(mark in value for mark in answer_usage.MARKS)):
            return
        if value.strip() == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = msgspec.json.decode(value)
            self.usage |= answer_usage.read_fields(chunk)
            if self._is_plain:
                self._take_texts(chunk)
        except _UNREADABLE:
            self._is_plain = False

    def _take_texts(self, chunk: Mapping[str, Any]) -> None:
        if not self._head:
            names = (name for name in immediate.SERVER_FIELDS if name in chunk)
            self._head = {name: chunk[name] for name in ("id", "created", "model", *names)}
        for choice in chunk["choices"]:
            delta, index = choice["delta"], choice["index"]
            self._is_plain = self._is_plain and _is_plain(choice, delta)
            for name in _TEXT_FIELDS:
                if name == "content" or delta.get(name):
                    self._texts.setdefault((index, name), []).append(delta.get(name) or "")
            if choice.get("finish_reason"):
                self._finish[index] = choice["finish_reason"]
