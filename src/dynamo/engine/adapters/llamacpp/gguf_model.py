"""The model directory of a GGUF file: the tokenizer, chat template and configuration that the file contains.

A GGUF file has all of a model in one file. Frontends read the files of Hugging Face, which the card names. So the
worker writes what the file says of tokens into such files, once, in a directory of the user's cache that also has a
link to the weights; from then on it is a model directory like any other. Files of these names that lie beside the GGUF
file replace those of the cache, for a model with a tokenizer that we cannot convert.

The only module that imports `gguf`, and imported itself only for a GGUF file: it is an extra, and numpy takes half a
second.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from dynamo.base import errors

_FORMAT = "3"  # of what is written; part of the directory's name
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_TEMPLATE, _TOOL_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")  # in the name of one of a model's files
_KV_BYTES = 2  # of a number in the KV cache, which is float16
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns that split a text into words before byte-pair encoding, by llama.cpp's name of them.
_WORD_PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-en", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("glm4", "chatglm-bpe", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT_4O,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
}  # fmt: skip
_WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "lfm2",
    "tekken",
)  # a word that is a token needs no merges, and a text begins with the first token
_END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "</s>",
)  # fmt: skip
# Of gpt-oss, where `<|end|>` ends a thought, and the answer follows.
_HARMONY_END_TOKENS = ("<|return|>", "<|call|>", "<|endoftext|>")


def unpack(path: Path, file_names: Sequence[str]) -> Path:
    """Return the model directory of a GGUF file, which is written unless it exists. Raises ConfigError.

    Files of these names that lie beside the file are copied into it.
    """
    # llama.cpp finds the other parts by the name, which a link of the hub's cache has and the file behind it has not
    path = path.parent.resolve() / path.name if _PART.search(path.name) else path.resolve()
    status = path.stat()
    own_files = [path.parent / name for name in file_names if (path.parent / name).is_file()]
    key = [_FORMAT, str(path), status.st_size, status.st_mtime_ns]
    key += [f"{file.name} {file.stat().st_mtime_ns}" for file in own_files]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pydynamo" / "gguf"
    name = f"{path.stem}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    directory = cache / name
    if directory.is_dir():
        return directory
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # whatever the library's arithmetic meets
        raise errors.ConfigError(f"{path}: expected a GGUF file: {error}") from error
    has_tokenizer = any(file.name == "tokenizer.json" for file in own_files)
    contents = model_files(fields, has_tokenizer=has_tokenizer)
    if any(file.name == _TEMPLATE for file in own_files):
        contents.pop(_TOOL_TEMPLATE, None)
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = Path(tempfile.mkdtemp(dir=cache, prefix=".draft-"))
        try:
            (draft / _TOOL_TEMPLATE).parent.mkdir()
            for file_name, content in contents.items():
                (draft / file_name).write_text(content, "utf-8")
            for file in own_files:
                shutil.copyfile(file, draft / file.relative_to(path.parent))
            (draft / "model.gguf").symlink_to(path)
            with contextlib.suppress(FileExistsError):  # another worker was quicker
                draft.rename(directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if directory.is_dir():
            return directory
        raise errors.ConfigError(
            f"the tokenizer of {path} cannot be written to {cache}: {error}; XDG_CACHE_HOME chooses another place"
        ) from error
    return directory


def model_files(fields: Mapping[str, Any], *, has_tokenizer: bool = False) -> dict[str, str]:
    """Return the contents of Hugging Face's files by name, from the metadata of a GGUF file. Raises ConfigError.

    Without tokenizer.json if there `has_tokenizer` already.
    """
    vocabulary = _Vocabulary(fields)
    architecture = fields["general.architecture"]

    def number(key: str, default: int = 0) -> int:
        value = fields.get(f"{architecture}.{key}", default)
        return int(max(value) if isinstance(value, list) else value)  # some have one for each layer

    num_heads = number("attention.head_count", 1)
    num_kv_heads = number("attention.head_count_kv", num_heads)
    head_dim = number("embedding_length") // num_heads
    kv_len = number("attention.key_length", head_dim) + number("attention.value_length", head_dim)
    num_layers = number("block_count")
    config = {
        "model_type": architecture,
        "vocab_size": len(vocabulary.tokens),
        "max_position_embeddings": number("context_length", 2048),
        "num_hidden_layers": num_layers,
        "kv_bytes_per_token": num_layers * num_kv_heads * kv_len * _KV_BYTES,
        "eos_token_id": vocabulary.end_ids,
    }
    special = {
        f"{name}_token": vocabulary.tokens[token]
        for name in ("bos", "eos", "unk")
        if (token := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    contents = {"config.json": json.dumps(config), "tokenizer_config.json": json.dumps(special)}
    if template := fields.get("tokenizer.chat_template"):
        contents[_TEMPLATE] = template
        if template_with_tools := fields.get("tokenizer.chat_template.tool_use"):
            contents[_TOOL_TEMPLATE] = template_with_tools
    if not has_tokenizer:
        contents["tokenizer.json"] = json.dumps(vocabulary.definition())
    return contents


class _Vocabulary:
    """The tokens of a GGUF file, and the definition of their tokenizer for Hugging Face's library."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.tokens: Sequence[str] = self._get("tokens") or ()
        self._types: Sequence[int] = self._get("token_type") or [_NORMAL] * len(self.tokens)
        if not self.tokens:
            raise errors.ConfigError(
                "expected a GGUF file with a vocabulary, got one without; of a model in parts, name the first"
            )

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an answer: those that the file names, and control tokens of a usual name."""
        named = [self._get(f"{kind}_token_id") for kind in ("eos", "eot", "eom")]
        names = _HARMONY_END_TOKENS if "<|return|>" in self.tokens else _END_TOKENS
        usual = [
            n
            for n, token in enumerate(self.tokens)
            if token in names and self._types[n] == _CONTROL
        ]
        return list(dict.fromkeys([token for token in named if token is not None] + usual))

    def definition(self) -> dict[str, Any]:
        """Return the content of tokenizer.json. Raises ConfigError."""
        kind = self._get("model")
        if kind not in ("gpt2", "llama"):
            raise errors.ConfigError(
                f"expected a tokenizer of the kind gpt2 or llama in the GGUF file, got {kind!r}: put the model's"
                " tokenizer.json beside the file"
            )
        added = [
            {
                "id": number,
                "content": token,
                "special": self._types[number] != _USER_DEFINED,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for number, token in enumerate(self.tokens)
            if self._types[number] in (_CONTROL, _USER_DEFINED, _UNKNOWN)
        ]
        parts = self._byte_level() if kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "post_processor": self._post_processor(default=kind == "llama"), **parts,
        }  # fmt: skip

    def _byte_level(self) -> dict[str, Any]:
        """Return the parts of a tokenizer with byte-pair encoding over bytes, such as Qwen's and Llama 3's."""
        name = self._get("pre") or "gpt-2"
        patterns = _WORD_PATTERNS.get(name)
        if patterns is None:
            raise errors.ConfigError(
                f"the GGUF file splits text into words as {name!r}; expected one of {', '.join(_WORD_PATTERNS)}: put"
                " the model's tokenizer.json beside the file"
            )
        splits: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
            for text in patterns
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        return {
            "normalizer": {"type": "NFC"} if name in ("qwen2", "qwen35") else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {token: number for number, token in enumerate(self.tokens)},
                "merges": [merge.split(" ", 1) for merge in self._get("merges") or ()],
                "byte_fallback": False,
                "ignore_merges": name in _WHOLE_WORDS,
            },
        }

    def _sentencepiece(self) -> dict[str, Any]:
        """Return the parts of a tokenizer of SentencePiece's BPE, such as Llama 2's: its scores order the merges."""
        has_prefix = self._get("add_space_prefix") is not False
        ids = {token: number for number, token in enumerate(self.tokens)}
        scores: Sequence[float] = self._get("scores") or [0.0] * len(self.tokens)
        merges = [
            (scores[number], len(token[:cut]), ids[token[:cut]], ids[token[cut:]])
            for token, number in ids.items()
            if self._types[number] == _NORMAL
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        merges.sort(key=lambda merge: (-merge[0], merge[2], merge[3]))
        unknown = self._get("unknown_token_id")
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        prepend = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, space]},
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    back,
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    *([strip] if has_prefix else []),
                ],
            },
            "model": {
                "type": "BPE",
                "vocab": ids,
                "merges": [[self.tokens[left], self.tokens[right]] for _, _, left, right in merges],
                "unk_token": self.tokens[unknown] if unknown is not None else None,
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _post_processor(self, *, default: bool) -> dict[str, Any] | None:
        """Return what puts the model's first token before a text, and its last after it, if it wants them."""
        is_default_bos = default or self._get("pre") in _WHOLE_WORDS
        wanted = {
            "bos": self._get("add_bos_token", is_default_bos),
            "eos": self._get("add_eos_token", False),
        }
        ids = {
            name: self._get(f"{name}_token_id")
            for name, is_added in wanted.items()
            if is_added and self._get(f"{name}_token_id") is not None
        }
        if not ids:
            return None
        texts = {name: self.tokens[token] for name, token in ids.items()}
        rows = [
            [{"SpecialToken": {"id": texts["bos"], "type_id": 0}}] if "bos" in texts else [],
            [{"Sequence": {"id": "A", "type_id": 0}}],
            [{"SpecialToken": {"id": texts["eos"], "type_id": 0}}] if "eos" in texts else [],
        ]
        single = [row for part in rows for row in part]
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                texts[name]: {"id": texts[name], "ids": [ids[name]], "tokens": [texts[name]]}
                for name in ids
            },
        }

    def _get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"tokenizer.ggml.{name}", default)
