"""How a caller says what the answer must look like: OpenAI's response formats and forced calls, vLLM's guided fields.

A schema, a regex and a grammar are passed on as they came: whether they make sense is for the engine to say, which
has the library that follows them.
"""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors

MAX_CHARS = 2**17  # of a schema, regex or grammar
MAX_CHOICES = 1024
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHARS)]
FormatName = Annotated[str, msgspec.Meta(max_length=64, pattern="^[a-zA-Z0-9_-]+$")]


class GuidedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the root of a request and of its `nvext`; at most one of the first four may be there."""

    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], msgspec.Meta(max_length=MAX_CHOICES)] | None = None
    guided_grammar: Text | None = None
    guided_decoding_backend: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema that an answer must fit, `strict` or not."""

    name: FormatName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        if (self.type == "json_schema") == (self.json_schema is None):
            found = "but it is missing" if self.json_schema is None else f"but type is {self.type}"
            raise errors.InvalidRequest(
                f"response_format.json_schema: expected with type json_schema, {found}",
                param="response_format.json_schema",
            )


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: Function
