"""Libraries that turn text into token ids and back. Only this module imports them.

Hugging Face's `tokenizers` is the reference. `fastokens` reads the same tokenizer.json and encodes 7 to 20 times as
fast; it takes the place of the reference where it gives the same ids and texts for some hundred probes at the load.
Both release the interpreter lock while they encode a batch.

To compare them takes some tenths of a second, and the memory of a second library, of which 20 MB are never given back.
So what a first load found out is kept for later ones (`Findings`), named by the checksum of tokenizer.json and the
versions of all that it depends on: it holds until one of these changes. A directory that cannot be read or written
costs a check.
"""

import functools
import hashlib
import itertools
import logging
import os
import random
import struct
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, Protocol

import fastokens
import msgspec

from dynamo.base import errors
from dynamo.protocols import blocks

NUM_PROBES = 400  # texts for which both libraries have to agree; they take some 10 ms
LibraryName = Literal["fastokens", "default"]  # as NVIDIA Dynamo's --tokenizer has them
# Ranges of characters of which probes are made: the kinds that patterns and normalizers tell apart.
_SCRIPTS = (
    (0x20, 0x7F), (0x20, 0x7F), (0x09, 0x0E), (0x80, 0x250), (0x300, 0x370), (0x370, 0x530),
    (0x590, 0x700), (0x900, 0xE80), (0x1100, 0x1200), (0x2000, 0x2200), (0x3000, 0x3100),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFB00, 0xFB07), (0x1F300, 0x1F700),
)  # fmt: skip
_REVISION = 2  # of the checks: a change of them makes earlier findings void
_PACKAGES = ("dynamo-serving", "fastokens", "tokenizers")
log = logging.getLogger(__name__)


class AddedToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that is taken out of a text before the text is split into words, as tokenizer.json has it."""

    id: int
    content: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens by id, as they are written in tokenizer.json; an id that does not exist has an empty token."""

    tokens: list[str]
    added: list[AddedToken]  # in the order of their ids


class _BytePairModel(msgspec.Struct, frozen=True):
    vocab: dict[str, int]


class _BytePairDefinition(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json with byte-pair encoding that have tokens."""

    model: _BytePairModel
    added_tokens: list[AddedToken] = []


def read_vocabulary(definition: str) -> Vocabulary:
    """Return the vocabulary of a definition with byte-pair encoding. Raises ValueError for another kind."""
    parts = msgspec.json.decode(definition, type=_BytePairDefinition)
    ids = parts.model.vocab | {token.content: token.id for token in parts.added_tokens}
    return Vocabulary(_by_id(ids), read_added_tokens(definition))


class _AddedTokens(msgspec.Struct, frozen=True):
    """The part of a tokenizer.json that `read_added_tokens` reads."""

    added_tokens: list[AddedToken] = []


def read_added_tokens(definition: str) -> list[AddedToken]:
    """Return the added tokens of a definition in the order of their ids; others cost no memory. Raises ValueError."""
    parts = msgspec.json.decode(definition, type=_AddedTokens)
    return sorted(parts.added_tokens, key=lambda token: token.id)


def _by_id(ids: Mapping[str, int]) -> list[str]:
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    return tokens


class Library(Protocol):
    """One model's tokenizer, made by one of the libraries."""

    long_text: int  # characters, which are 1 or 2 ms of work

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the packed ids of each text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of these tokens together; ids that do not exist are skipped."""
        ...

    def token_of(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; an id that does not exist has an empty token."""
        ...

    def id_of(self, token: str) -> int | None:
        """Return the id of a token that is spelled as in the vocabulary; None if there is none."""
        ...


class HuggingFaceLibrary:
    """Encodes by Hugging Face's `tokenizers`, which reads every tokenizer.json."""

    long_text = 4096

    def __init__(self, definition: str) -> None:
        """Raises ConfigError for a definition that the library cannot read."""
        import tokenizers  # 6 MB, which only the first load of a model needs

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exceptions
            raise errors.ConfigError(
                f"tokenizer.json: expected a definition that tokenizers {tokenizers.__version__} "
                f"can read: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Raises InvalidRequest for half a surrogate pair, which the template of a request may write."""
        try:
            encodings = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise errors.InvalidRequest("expected a text of whole characters") from error
        return [blocks.pack(encoding.ids) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_of(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def vocabulary(self) -> Vocabulary:
        """Return all tokens, and which of them are added ones."""
        added = [
            AddedToken(
                id=token_id,
                content=token.content,
                special=token.special,
                normalized=token.normalized,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for token_id, token in sorted(self._tokenizer.get_added_tokens_decoder().items())
        ]
        return Vocabulary(_by_id(self._tokenizer.get_vocab()), added)

    def find_word_starts(self, text: str) -> list[int]:
        """Return where the parts begin that the tokenizer's model encodes one at a time."""
        words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [start for _, (start, _) in words]


class OffsetTokenizer:
    """Encodes texts of any length for an encoder, and says which characters each token stands for."""

    def __init__(self, definition: str) -> None:
        """Raises ConfigError for a definition that the library cannot read."""
        self._tokenizer = HuggingFaceLibrary(definition)._tokenizer
        mark = self._tokenizer.encode("a")
        first = mark.special_tokens_mask.index(0)
        last = len(mark.ids) - mark.special_tokens_mask[::-1].index(0)
        self.prefix, self.suffix = mark.ids[:first], mark.ids[last:]  # special tokens of a text

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return for each text its ids, without special tokens, and their first and last characters."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]


class FastokensLibrary:
    """Encodes by `fastokens`, which reads most tokenizers with byte-pair encoding."""

    long_text = 32_768

    def __init__(self, definition: str) -> None:
        """Raises ValueError for a definition that the library cannot read."""
        self._tokenizer = fastokens.Tokenizer.from_json_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # The first text makes a table of the vocabulary's words, in 160 ms for 128,000 tokens; the first text of any
        # other thread, as the event loop's, only a copy of it, in 5 ms.
        self.encode(["a"], add_special_tokens=False)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Raises InvalidRequest if the model's pattern needs too many steps for one of the texts."""
        try:
            packed, offsets = self._tokenizer.encode_batch_flat(
                list(texts), add_special_tokens=add_special_tokens
            )
        except ValueError as error:
            raise errors.InvalidRequest(
                f"expected a text that the tokenizer of this model can split into words: {error}"
            ) from error
        if len(texts) == 1:
            return [packed]
        bounds = [blocks.TOKEN_BYTES * bound for (bound,) in struct.iter_unpack("<Q", offsets)]
        return [packed[begin:end] for begin, end in itertools.pairwise(bounds)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_of(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


def load_fastest(definition: str, reference: HuggingFaceLibrary) -> Library:
    """Return `fastokens` for this definition, or the reference, if they differ or fastokens cannot read it."""
    try:
        library = FastokensLibrary(definition)
        vocabulary = reference.vocabulary()
        equal = read_vocabulary(definition) == vocabulary and _behave_equally(
            library, reference, vocabulary.tokens
        )
    except (ValueError, errors.InvalidRequest) as error:
        log.info(
            "tokenizer: `tokenizers` is used, because fastokens cannot read this one: %s", error
        )
        return reference
    if not equal:
        log.info("tokenizer: `tokenizers` is used, because fastokens gives other tokens or texts")
    return library if equal else reference


def _behave_equally(library: Library, reference: Library, tokens: Sequence[str]) -> bool:
    """Return whether both give the same tokens, the same ids for texts of many scripts, and the same texts for ids."""
    if any(library.token_of(token_id) != token for token_id, token in enumerate(tokens)):
        return False
    rng = random.Random(0)
    probes = ["", " ", "\n\n", " a  b ", "don't WE'LL", "1234567", "\r\n\t x", "👨\u200d👩\u200d👧"]
    while len(probes) < NUM_PROBES:
        ranges = rng.choices(_SCRIPTS, k=3)
        letters = (chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 24)))
        words = [rng.choice(tokens) for _ in range(rng.randrange(3))]
        probes.append("".join((*words, *letters, *reversed(words))))
    for add_special_tokens in (False, True):
        packed_ids = reference.encode(probes, add_special_tokens=add_special_tokens)
        if library.encode(probes, add_special_tokens=add_special_tokens) != packed_ids:
            return False
    rows = [blocks.unpack(packed) for packed in packed_ids]
    rows += [[token_id] for token_id in range(0, len(tokens), max(1, len(tokens) // NUM_PROBES))]
    return all(
        library.decode(row, skip_special_tokens=skip)
        == reference.decode(row, skip_special_tokens=skip)
        for row in rows
        for skip in (False, True)
    )


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one tokenizer.json."""

    num_ids: int  # all ids are below it
    is_fastokens_equal: bool  # it gives the ids and texts of the reference
    is_cutting_exact: bool  # a prompt may be cut at the tokens that are taken out of the raw text
    splits_at_lines: bool  # long text may be cut at line ends before letters


class FindingsDirectory:
    """Keeps findings, one small file for each tokenizer; several processes may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_user(cls) -> "FindingsDirectory | None":
        """Return `pydynamo/tokenizers` in XDG_CACHE_HOME; None for a user without a home, as in some containers."""
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        except RuntimeError:
            return None
        return cls(cache / "pydynamo" / "tokenizers")

    def find(self, definition: bytes) -> Findings | None:
        """Return the findings about this content of tokenizer.json; None if there are none."""
        try:
            return msgspec.json.decode(self._file(definition).read_bytes(), type=Findings)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.debug("findings about a tokenizer cannot be read: %s", error)
            return None

    def keep(self, definition: bytes, findings: Findings) -> None:
        """Write the whole file or nothing."""
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._path, prefix="coming-", delete=False) as new:
                new.write(msgspec.json.encode(findings))
            Path(new.name).replace(self._file(definition))
        except OSError as error:
            log.debug("findings about a tokenizer cannot be kept: %s", error)

    def _file(self, definition: bytes) -> Path:
        key = hashlib.sha256(definition)
        key.update(_versions())
        return self._path / f"{key.hexdigest()}.json"


@functools.cache
def _versions() -> bytes:
    return msgspec.json.encode([_REVISION, *map(metadata.version, _PACKAGES)])
