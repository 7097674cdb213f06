"""Detokenizers: from token ids to text as they come, never splitting a character.

Nearly all tokenizers are tables: each token stands for some bytes, whatever stands beside it. So at load we make a
table from id to text, or to bytes where a token ends inside a character, and compare it with the tokenizer once, over
the whole vocabulary. Then it is empty again, and takes each token when it first comes: a token is 60 bytes in Python,
and most of a vocabulary is never used. Two kinds of tokenizers are tables:

- byte-level (GPT-2, Llama-3, Qwen): a token's characters are an alphabet of 256 that stand for bytes;
- SentencePiece (Llama-2, Mistral, Gemma): "▁" is a space, `<0xE4>` a byte; some drop the space that begins a text.

For any other the tokenizer itself decodes a window of the latest tokens, twice per push, which costs ten times more.

Bytes that can never become a character turn into U+FFFD once that is certain.

`ChoiceText` is the text of one choice: detokenized, without stop strings and the token that ended it.
"""  # decider

import array
import codecs
import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dynamo.preprocess import stop_strings, tokenize
from dynamo.protocols import blocks, generate

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT_LEN = 8  # prompt tokens that can matter to the text after them
_ROW_LEN = 4096  # tokens that are compared with the tokenizer at once
_MAX_PENDING = 64  # tokens after which a window no longer waits for the end of a character

Piece = str | bytes  # text, or bytes that are no whole characters


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain."""
        ...

    def finish(self) -> str:
        """End the tokens; return the text that was pending."""
        ...


class _Table:
    """The text of each token of one tokenizer, or its bytes; it is read from the tokenizer when it is first needed."""

    __slots__ = ("_read", "_tokenizer", "pieces")

    def __init__(
        self,
        tokenizer: tokenize.Tokenizer,
        read: Callable[[str], bytes],
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        """Tokens in `hidden` have no text."""
        self._tokenizer = tokenizer
        self._read = read
        self.pieces: list[Piece | None] = [None] * tokenizer.num_ids  # by id
        for token_id in hidden:
            self.pieces[token_id] = ""

    def take(self, token_id: int) -> Piece:
        """Return the text of a token that exists, or its bytes."""
        piece = self.pieces[token_id]
        if piece is None:
            piece = self.pieces[token_id] = _piece(self._read(self._tokenizer.token_of(token_id)))
        return piece

    def hiding(self, hidden: frozenset[int]) -> "_Table":
        """Return a table in which these tokens have no text."""
        return _Table(self._tokenizer, self._read, hidden)


class TextDecoder:
    """Makes detokenizers for one tokenizer."""

    def __init__(self, tokenizer: tokenize.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table, self._drops_space = _table_of(tokenizer)
        self._hide(tokenizer.special_ids)

    def _hide(self, hidden: frozenset[int]) -> None:
        self._hidden = hidden
        self._visible = self._table and self._table.hiding(hidden)

    def showing(self, tokens: Iterable[str]) -> "TextDecoder":
        """Return a decoder that shows these tokens as text, even if they are special."""
        shown = self._hidden.intersection(map(self._tokenizer.id_of, tokens))
        if not shown:
            return self
        decoder = copy.copy(self)
        decoder._hide(self._hidden - shown)
        return decoder

    def new(self, prompt: bytes = b"", *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for one choice that follows `prompt` (packed ids)."""
        table = self._visible if skip_special_tokens else self._table
        if table and not self._drops_space:
            return TableDetokenizer(table, drop_space=False)
        context = blocks.unpack(prompt[-_CONTEXT_LEN * blocks.TOKEN_BYTES :])
        if table:
            begins_text = self._tokenizer.special_ids.issuperset(context)
            return TableDetokenizer(table, drop_space=begins_text)
        hidden = self._hidden if skip_special_tokens else frozenset[int]()
        return WindowDetokenizer(self._tokenizer, context, hidden)

    def decode(self, packed: bytes) -> str:
        """Return the text of packed ids, special tokens included."""
        return self._tokenizer.decode(blocks.unpack(packed), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not."""
        if self._table and 0 <= token_id < self._tokenizer.num_ids:
            piece = self._table.take(token_id)
            return piece if isinstance(piece, bytes) else piece.encode()
        return self._tokenizer.decode((token_id,), skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, with U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")


class TableDetokenizer:
    """Looks each token up in the table."""

    __slots__ = ("_drop_space", "_is_plain", "_pending", "_pieces", "_take")

    def __init__(self, table: _Table, *, drop_space: bool) -> None:
        self._pieces = table.pieces
        self._take = table.take
        self._drop_space = drop_space  # the next character, if it is a space
        self._pending = b""  # the beginning of a character
        self._is_plain = not drop_space

    def push(self, token_ids: Sequence[int]) -> str:
        if self._is_plain and len(token_ids) == 1 and token_ids[0] < len(self._pieces):
            piece = self._pieces[token_ids[0]]
            if type(piece) is str:
                return piece
        pieces = [
            self._pieces[number] or self._take(number)
            for number in token_ids
            if number < len(self._pieces)
        ]
        data = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
        return self._decode(data, is_last=False)

    def finish(self) -> str:
        return self._decode(b"", is_last=True) if self._pending else ""

    def _decode(self, data: bytes, *, is_last: bool) -> str:
        data = self._pending + data
        text, num_used = codecs.utf_8_decode(data, "replace", is_last)
        self._pending = data[num_used:]
        if self._drop_space and text:
            self._drop_space = False
            text = text.removeprefix(" ")
        self._is_plain = not self._pending and not self._drop_space
        return text


class WindowDetokenizer:
    """Lets the tokenizer decode the latest tokens with and without the new ones; the difference is the new text."""

    def __init__(
        self, tokenizer: tokenize.Tokenizer, context: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window = self._drop_hidden(context)
        # tokens at the beginning of the window with text that was returned
        self._num_returned = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        self._window += self._drop_hidden(token_ids)
        before, after = self._decode(self._window[: self._num_returned]), self._decode(self._window)
        is_certain = len(after) > len(before) and not after.endswith(_REPLACEMENT)
        if not is_certain and len(self._window) - self._num_returned <= _MAX_PENDING:
            return ""
        del self._window[: self._num_returned]
        self._num_returned = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        before = self._decode(self._window[: self._num_returned])
        return self._decode(self._window)[len(before) :]

    def _drop_hidden(self, token_ids: Sequence[int]) -> list[int]:
        return [number for number in token_ids if number not in self._hidden]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _table_of(tokenizer: tokenize.Tokenizer) -> tuple[_Table | None, bool]:
    """Return the table, if there is one, and whether the space that begins a text is dropped."""
    definition = tokenizer.decoder_definition
    steps = definition["decoders"] if definition.get("type") == "Sequence" else [definition]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        read, drops_space = _byte_level, False
    elif (
        kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        and (steps[0]["pattern"], steps[0]["content"]) == ({"String": "▁"}, " ")
        and steps[3:] in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}])
    ):
        read, drops_space = _sentencepiece, len(steps) == 4
    else:
        return None, False
    if not _agrees(tokenizer, read, drops_space):
        return None, False
    return _Table(tokenizer, read), drops_space


class _ByteAlphabet(dict[int, int]):
    """GPT-2's alphabet: printable bytes stand for themselves, all others for the characters from U+0100 on."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        unprintable = [byte for byte in range(256) if byte not in set(printable)]
        super().__init__({byte: byte for byte in printable})
        self.update({256 + number: byte for number, byte in enumerate(unprintable)})

    def __missing__(self, char: int) -> int:
        return 0x100  # no byte


_ALPHABET = _ByteAlphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # an added token outside of the alphabet stands for itself
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode()


def _piece(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _agrees(tokenizer: tokenize.Tokenizer, read: Callable[[str], bytes], drops_space: bool) -> bool:
    """Return whether the tokenizer decodes its whole vocabulary, row by row, as a table of these pieces does.

    Byte tokens outside of ASCII are left out: in a row that is no text, a byte fallback gives up on all of them.
    A table of its own for each row, because Python keeps the memory of many objects that were there at once.
    """
    for begin in range(0, tokenizer.num_ids, _ROW_LEN):
        table = _Table(tokenizer, read)
        ids = [
            token_id
            for token_id in range(begin, min(begin + _ROW_LEN, tokenizer.num_ids))
            if isinstance(table.take(token_id), str)
            or not _BYTE_TOKEN.fullmatch(tokenizer.token_of(token_id))
        ]
        detokenizer = TableDetokenizer(table, drop_space=drops_space)
        text = detokenizer.push(ids) + detokenizer.finish()
        if text != tokenizer.decode(ids, skip_special_tokens=False):
            return False
    return True


_ENDED_BY_TOKEN = (generate.FinishReason.EOS, generate.FinishReason.STOP)


class ChoiceText:
    """The text of one choice, and its tokens, four bytes each, from which another worker may have to continue it.

    Once `stop_reason` is set the text is complete, whatever the engine still sends.
    """

    __slots__ = ("_detokenizer", "_keeps_stop", "_min_tokens", "_stops", "_tokens", "passes_stops",
                 "stop_reason")  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        conditions: generate.StopConditions,
        *,
        keeps_stop: bool = False,
    ) -> None:
        """With `keeps_stop` the text ends with the stop string, or the visible token, that ended it."""
        self._detokenizer = detokenizer
        self._keeps_stop = keeps_stop
        self._stops = stop_strings.StopStrings(conditions.stop) if conditions.stop else None
        self._min_tokens = conditions.min_tokens
        self._tokens = array.array("I")
        self.passes_stops = False  # for now no stop string ends the text
        self.stop_reason: str | None = None  # the stop string that ended the text

    def push(self, output: generate.Output) -> str:
        """Add an output; return the text that is now certain, or all pending text if the output has a finish reason."""
        token_ids = output.token_ids
        if len(token_ids) == 1:  # nearly always so
            self._tokens.append(token_ids[0])
        else:
            self._tokens.extend(token_ids)
        if output.finish_reason is None and self._stops is None:
            return self._detokenizer.push(token_ids)
        text = self._detokenizer.push(token_ids if self._keeps_stop else visible_ids(output))
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        may_stop = len(self._tokens) > self._min_tokens and not self.passes_stops
        if self._stops is not None and may_stop:
            text, self.stop_reason = self._stops.push(text)
            if self._keeps_stop and self.stop_reason is not None:
                text += self.stop_reason
            if output.finish_reason is not None and self.stop_reason is None:
                text += self._stops.flush()
        elif self._stops is not None:
            text = self._stops.flush() + text
        return text

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens generated so far."""
        return len(self._tokens)

    @property
    def token_ids(self) -> bytes:
        """Return all generated tokens, packed."""
        return blocks.pack(self._tokens)

    @property
    def num_held(self) -> int:
        """Return the number of characters that are held back, because they may become a stop string."""
        return self._stops.num_held if self._stops is not None else 0


def visible_ids(output: generate.Output) -> Sequence[int]:
    """Return the tokens of this output without the one that ended the choice."""
    ids = output.token_ids
    return ids[:-1] if output.finish_reason in _ENDED_BY_TOKEN else ids
