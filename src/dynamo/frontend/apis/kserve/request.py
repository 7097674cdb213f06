"""Requests of KServe's v2 protocol, with text in and text out: each becomes the equivalent completion request.

    text_input      BYTES [1]    the prompt
    streaming       BOOL [1]     optional
    parameters      what /v1/completions takes: max_tokens, temperature, seed, stop …
    text_output     BYTES [-1]   one element for each choice
    finish_reason   BYTES [-1]   likewise

Tensors come as JSON here, or raw behind it, as Triton's binary extension has them; those of gRPC are converted to JSON
first (`transcode`). Triton's generate extension is the same without tensors, and parameters may stand beside the text,
by the names of TensorRT-LLM's model too. A raw element of BYTES is its length, 32 bits little-endian, and then itself.
"""  # decider

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import completions
from dynamo.protocols import model_errors
from dynamo.runtime.http import json_body

VERSION = "1"  # every model has this one
PLATFORM = "dynamo"
TEXT_INPUT, STREAMING = "text_input", "streaming"
TEXT_OUTPUT, FINISH_REASON = "text_output", "finish_reason"
LENGTH = struct.Struct("<I")
_SIZE = "binary_data_size"  # of a tensor's raw data, in bytes
_OUTPUTS = (TEXT_OUTPUT, FINISH_REASON)
# fields of a completion request that are set in another way, or not supported
_FORBIDDEN_PARAMETERS = (
    *("model", "prompt", "stream", "stream_options", "infer_id", "nvext"),
    *("logprobs", "prompt_logprobs", "return_tokens_as_token_ids", "return_token_ids"),
    *("tools", "tool_choice"),  # of chats, which the protocol has not
)
# of TensorRT-LLM's model
_ALIASES = {"stop_words": "stop", "random_seed": "seed", "min_length": "min_tokens"}
_GENERATE_FIELDS = frozenset(("text_input", "id", "parameters", "stream"))
_NO_EFFECT = "triton_enable_empty_final_response"  # the last response is always marked as final


class InferRequest(
    completions.CompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A completion request with the client's own id, which the answer repeats."""

    infer_id: str | None = None


class InputTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor of the request."""

    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: dict[str, Any] | None = None


class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A requested output; the answer always has all outputs."""

    name: str
    parameters: dict[str, Any] | None = None


class InferBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v2/models/{name}/infer`."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[RequestedOutput] | None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v2/models/{name}/generate`."""

    text_input: str
    id: str | None = None
    parameters: dict[str, Any] | None = None
    stream: bool | None = None


class StreamedGenerateBody(GenerateBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for `generate_stream`, where `stream` may be true instead of false."""


_infer_decoder = json_body.RequestDecoder(InferBody)
_generate_decoder = json_body.RequestDecoder(GenerateBody)
_completion_decoder = json_body.RequestDecoder(InferRequest)
_wrong = errors.InvalidRequest.of_param


def check_version(model: str, version: str) -> None:
    """Raise ModelNotFound for any version but "1"; an empty version is the same."""
    if version not in ("", VERSION):
        raise model_errors.ModelNotFound(
            f"The model {model[:100]!r} has one version, {VERSION}, and no {version[:20]!r}",
            param="model_version",
        )


def decode_infer(
    body: bytes, *, model: str, version: str, can_stream: bool, json_bytes: int | None = None
) -> InferRequest:
    """Return the completion request in a body with tensors; raw data begin after `json_bytes`.

    Raises RequestError, which names the field.
    """
    check_version(model, version)
    decoded = _infer_decoder.decode(body if json_bytes is None else body[:json_bytes])
    inputs = decoded.inputs if json_bytes is None else _read_inputs(decoded, body[json_bytes:])
    tensors = _collect_tensors(inputs)
    for output in decoded.outputs or ():
        if output.name not in _OUTPUTS:
            raise _wrong("outputs", f"expected {' or '.join(_OUTPUTS)}, got {output.name!r}")
    is_stream = STREAMING in tensors and _read_element(tensors[STREAMING], "BOOL", bool)
    if is_stream and not can_stream:
        raise _wrong(
            STREAMING,
            "expected false; ModelStreamInfer (gRPC), infer_stream and generate_stream (HTTP) stream",
        )
    if TEXT_INPUT not in tensors:
        raise _wrong(
            "inputs", f"expected a tensor {TEXT_INPUT}, got {', '.join(tensors) or 'none'}"
        )
    text = _read_element(tensors[TEXT_INPUT], "BYTES", str)
    return _make_request(model, text, decoded.parameters or {}, is_stream, decoded.id)


def decode_generate(body: bytes, *, model: str, version: str, can_stream: bool) -> InferRequest:
    """Return the completion request in a body without tensors, a stream with `can_stream`. Raises RequestError."""
    check_version(model, version)
    json_body.check_structure(body)
    fields, parameters = json_body.decode_untyped(body), {}
    if isinstance(fields, dict):
        beside = {name: fields.pop(name) for name in fields.keys() - _GENERATE_FIELDS}
        parameters = {
            _ALIASES.get(name, name): beside[name] for name in beside if beside[name] != ""
        }
    decoded = _generate_decoder.convert(fields, "")
    parameters |= decoded.parameters or {}
    for param, is_stream in (
        ("stream", decoded.stream),
        ("parameters.stream", parameters.pop("stream", None)),
    ):
        if is_stream not in (None, can_stream):
            raise _wrong(param, f"expected {str(can_stream).lower()} or nothing at this route")
    return _make_request(model, decoded.text_input, parameters, can_stream, decoded.id)


def read_raw(name: str, datatype: str, raw: bytes) -> list[Any]:
    """Return the elements of a tensor of BOOL or BYTES; other types have none here. Raises InvalidRequest."""
    if datatype == "BOOL":
        return [byte != 0 for byte in raw]
    elements = _split_raw(name, raw) if datatype == "BYTES" else ()
    return [decode_text(name, element) for element in elements]


def _split_raw(name: str, raw: bytes) -> Iterator[bytes]:
    """Yield the elements of a raw BYTES tensor. Raises InvalidRequest."""
    start = 0
    while start < len(raw):
        head = raw[start : start + LENGTH.size]
        end = start + LENGTH.size
        end += LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 1
        if end > len(raw):
            raise _wrong(
                name,
                f"expected elements behind their lengths, got {len(raw)} bytes that end within one",
            )
        yield raw[start + LENGTH.size : end]
        start = end


def decode_text(name: str, element: bytes) -> str:
    """Return the text of an element. Raises InvalidRequest, which names the tensor."""
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise _wrong(name, f"expected UTF-8: {error}") from error


def _read_inputs(body: InferBody, raw: bytes) -> list[InputTensor]:
    """Return the inputs with their data, of which those with a size stand in `raw` one after the other."""
    tensors, start = [], 0
    for tensor in body.inputs:
        size = (tensor.parameters or {}).get(_SIZE)
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(raw) - start:
                raise _wrong(
                    tensor.name,
                    f"expected a {_SIZE} within the {len(raw)} bytes that follow the JSON, got "
                    + json_body.describe(size),
                )
            data = read_raw(tensor.name, tensor.datatype, raw[start : start + size])
            tensor = msgspec.structs.replace(tensor, data=data)
            start += size
        tensors.append(tensor)
    return tensors


def _collect_tensors(inputs: Sequence[InputTensor]) -> dict[str, InputTensor]:
    tensors = {tensor.name: tensor for tensor in inputs}
    unknown = sorted(tensors.keys() - {TEXT_INPUT, STREAMING})
    if unknown or len(tensors) < len(inputs):
        actual = f"got {unknown[0]!r}" if unknown else "got one twice"
        raise _wrong(
            "inputs", f"expected the tensors {TEXT_INPUT} and, if wanted, {STREAMING}, {actual}"
        )
    return tensors


def _read_element(tensor: InputTensor, datatype: str, kind: type) -> Any:
    """Return the only element of a tensor, however deep its data is nested."""
    if tensor.datatype != datatype or any(length != 1 for length in tensor.shape):
        raise _wrong(
            tensor.name,
            f"expected {datatype} of shape [1], got {tensor.datatype[:20]} of shape {tensor.shape[:8]}",
        )
    data = tensor.data
    while isinstance(data, list) and len(data) == 1:
        data = data[0]
    if type(data) is not kind:
        raise _wrong(tensor.name, f"expected one {kind.__name__}, got {json_body.describe(data)}")
    return data


def _make_request(
    model: str, text: str, parameters: Mapping[str, Any], is_stream: bool, infer_id: str | None
) -> InferRequest:
    fields = {name: value for name, value in parameters.items() if name != _NO_EFFECT}
    for name in _FORBIDDEN_PARAMETERS:
        if name in fields:
            raise _wrong(f"parameters.{name}", "not supported; leave it out")
    fields |= {"model": model, "prompt": text, "stream": is_stream, "infer_id": infer_id}
    request = _completion_decoder.convert(fields, "parameters")
    if is_stream and request.num_choices > 1:
        raise _wrong("parameters.n", f"expected 1 in a stream, got {request.num_choices}")
    return request
