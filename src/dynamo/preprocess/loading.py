"""Loading: from a model's card to its `Preprocessor`, by the model's files, which are checked against the card."""

import errno
import hashlib
import stat
from pathlib import Path
from typing import Any

import msgspec

from dynamo.base import clock, errors
from dynamo.preprocess import images, options, preprocessor, template, tokenize
from dynamo.preprocess.parsers import formats
from dynamo.protocols import model_card

MAX_FILE_BYTES = 256 * 2**20


def read_regular_file(path: Path, num_bytes: int | None = None) -> bytes:
    """Return the content of a file that another process named, of `num_bytes` if given.

    Raises OSError, also for anything but a regular file (a device may never end), and for one that is too large.
    """
    status = path.stat()  # before it is opened: opening a device may already do something
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    if status.st_size > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"expected at most {MAX_FILE_BYTES} bytes", str(path))
    if num_bytes is not None and status.st_size != num_bytes:
        raise OSError(errno.EINVAL, f"expected {num_bytes} bytes, got {status.st_size}", str(path))
    with path.open("rb") as file:
        return file.read(status.st_size)


class ModelFiles:
    """Reads files of a model by name. A file that the card names must have the checksum of the worker's file."""

    def __init__(self, card: model_card.ModelCard) -> None:
        self._card = card

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if the model has no such file. Raises ConfigError."""
        named = self._card.files.get(name)
        if named is None and self._card.files:
            return None
        path = Path(named.path) if named else Path(self._card.source_path) / name
        if not named and not path.is_file():
            return None
        try:
            content = read_regular_file(path)
        except OSError as error:
            raise errors.ConfigError(
                f"model {self._card.display_name!r}: cannot read {path}, which its worker named: "
                f"{error.strerror}; the model's files must be on this machine under the same path"
            ) from error
        if named:
            checksum = "sha256:" + hashlib.sha256(content).hexdigest()
            if checksum != named.checksum:
                raise errors.ConfigError(
                    f"model {self._card.display_name!r}: {named.path} is not the file that its worker serves: "
                    f"expected {named.checksum}, got {checksum}; copy the worker's file here"
                )
        return content

    def read_text(self, name: str) -> str | None:
        """Return the content of a file as text; None if the model has no such file. Raises ConfigError."""
        content = self.read(name)
        try:
            return content.decode() if content is not None else None
        except UnicodeDecodeError as error:
            raise errors.ConfigError(f"{name}: expected UTF-8 text: {error}") from error

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; empty if the model has no such file. Raises ConfigError."""
        content = self.read(name)
        if content is None:
            return {}
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise errors.ConfigError(f"{name}: expected a JSON object: {error}") from error


def load_preprocessor(
    card: model_card.ModelCard,
    clock: clock.Clock,
    *,
    tokenizer_options: tokenize.TokenizerOptions = tokenize.DEFAULT_OPTIONS,
    cache_observer: tokenize.CacheObserver = tokenize.NoCacheObserver(),  # noqa: B008 (it has no state)
) -> preprocessor.Preprocessor:
    """Read the files of a model and return its preprocessor. Takes some tenths of a second. Raises ConfigError."""
    files = ModelFiles(card)
    definition = files.read("tokenizer.json")
    if definition is None:
        raise errors.ConfigError(
            f"model {card.display_name!r}: expected a tokenizer.json among its files; "
            "transformers' save_pretrained writes one"
        )
    config = files.read_json("config.json")
    generation_config = files.read_json("generation_config.json")
    tokenizer_config = files.read_json("tokenizer_config.json")
    plain, with_tools = _by_use(
        files.read_text("chat_template.jinja")
        or files.read_json("chat_template.json").get("chat_template")
        or tokenizer_config.get("chat_template")
        or ""
    )
    with_tools = files.read_text("additional_chat_templates/tool_use.jinja") or with_tools
    older = files.read_json("special_tokens_map.json")  # where older models have them
    special_tokens = _special_tokens(older) | _special_tokens(tokenizer_config)
    tokenizer = tokenize.Tokenizer(
        definition,
        tokenizer_options,
        special_tokens=special_tokens,
        cache_observer=cache_observer,
    )
    chat_template = None
    if plain:
        chat_template = template.ChatTemplate(
            plain,
            source_with_tools=with_tools,
            special_tokens={**special_tokens, **card.runtime_config.template_defaults},
            clock=clock,
        )
    vocab_size = config.get("vocab_size")
    preparer = preprocessor.Preprocessor(
        tokenizer=tokenizer,
        chat_template=chat_template,
        context_length=card.context_length,
        vocab_size=vocab_size if type(vocab_size) is int else tokenizer.num_ids,
        eos_token_ids=options.collect_eos_token_ids(
            (generation_config, config), tokenizer.id_of(special_tokens.get("eos_token", ""))
        ),
        defaults=options.read_defaults(generation_config),
        answer_format=formats.select_format(
            card.runtime_config.tool_call_parser,
            card.runtime_config.reasoning_parser,
            template="\n".join(filter(None, (plain, with_tools))),
        ),
        infill_format=card.runtime_config.infill_format,
    ).with_images(images.ImageInput.of_model(config, card.runtime_config.max_images))
    if not card.runtime_config.supports_thinking_limit:
        preparer = preparer.without_thinking_limits()
    del definition
    tokenize.return_freed_memory()
    return preparer


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token` and the other special tokens; the file has each as a text, or in an object."""
    tokens = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _by_use(source: Any) -> tuple[str, str | None]:
    """Return the template, and the one for requests with tools; older models have a list of them, by name."""
    if isinstance(source, str):
        return source, None
    try:
        by_name = {entry["name"]: entry["template"] for entry in source}
        return by_name["default"], by_name.get("tool_use")
    except (TypeError, KeyError) as error:
        raise errors.ConfigError(
            "chat_template: expected a text, or a list of {name, template} with the name default, "
            f"got {str(source)[:80]}"
        ) from error
