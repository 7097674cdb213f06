"""Between gRPC's messages and the JSON that the HTTP routes take and give.

So there is one reading and one checking of requests, and gRPC cannot differ from HTTP but in its wrapping. Tensors may
come in `contents` or as raw bytes (an element of BYTES is its length, 32 bits little-endian, and then itself); the
answer's come in the form in which the request's came.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis.kserve import messages
from dynamo.frontend.apis.kserve import request as kserve

FINAL = "triton_final_response"
_LENGTH = struct.Struct("<I")
_Response = messages.CLASS_BY_NAME["ModelInferResponse"]
_StreamResponse = messages.CLASS_BY_NAME["ModelStreamInferResponse"]


def body_of(request: Any) -> bytes:
    """A ModelInferRequest as JSON. Raises InvalidRequest for what JSON cannot say."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise errors.InvalidRequest(
            f"raw_input_contents: expected one for each of {len(request.inputs)} inputs, got {len(raw)}",
            param="raw_input_contents",
        )
    inputs = [
        _input(tensor, raw[place] if raw else None) for place, tensor in enumerate(request.inputs)
    ]
    body: dict[str, Any] = {
        "inputs": inputs,
        "parameters": _values(request.parameters),
        "outputs": [{"name": output.name} for output in request.outputs],
    }
    if request.id:
        body["id"] = request.id
    return msgspec.json.encode(body)


def response(told: Mapping[str, Any], *, is_raw: bool) -> Any:
    """What `shapes.InferShape` tells, as a ModelInferResponse."""
    made = _Response(
        model_name=told["model_name"],
        model_version=told["model_version"],
        id=told.get("id", ""),
    )
    for output in told["outputs"]:
        _add_output(made, output["name"], output["data"], is_raw=is_raw)
    return made


def stream_response(told: Mapping[str, Any], *, is_raw: bool, request_id: str) -> Any:
    """An event of a stream as a ModelStreamInferResponse; the last one says that it is."""
    if "error" in told:
        return failure(told["error"], request_id)
    made = response(told, is_raw=is_raw)
    is_last = any(output["name"] == kserve.FINISH_REASON for output in told["outputs"])
    made.parameters[FINAL].bool_param = is_last
    return _StreamResponse(infer_response=made)


def failure(message: str, request_id: str) -> Any:
    """A request of a stream that failed; the stream itself goes on."""
    return _StreamResponse(error_message=message, infer_response=_Response(id=request_id))


def _input(tensor: Any, raw: bytes | None) -> dict[str, Any]:
    name, datatype = tensor.name, tensor.datatype
    data: list[Any] = []
    if datatype == "BOOL":
        data = list(tensor.contents.bool_contents) if raw is None else [byte != 0 for byte in raw]
    elif datatype == "BYTES":
        found = tensor.contents.bytes_contents if raw is None else _elements(name, raw)
        data = [_text(name, element) for element in found]
    shape = list(tensor.shape)
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _elements(name: str, raw: bytes) -> Iterator[bytes]:
    """The elements of a raw BYTES tensor. Raises InvalidRequest."""
    start = 0
    while start < len(raw):
        head = raw[start : start + _LENGTH.size]
        end = start + _LENGTH.size
        end += _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 1
        if end > len(raw):
            raise errors.InvalidRequest(
                f"{name}: expected elements behind their lengths, got {len(raw)} bytes that end within one",
                param=name,
            )
        yield raw[start + _LENGTH.size : end]
        start = end


def _text(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise errors.InvalidRequest(f"{name}: expected UTF-8: {error}", param=name) from error


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = getattr(parameter, kind) if kind else None
    return found


def _add_output(made: Any, name: str, elements: list[str], *, is_raw: bool) -> None:
    packed = [element.encode() for element in elements]
    output = made.outputs.add(name=name, datatype="BYTES", shape=[len(packed)])
    if is_raw:
        made.raw_output_contents.append(b"".join(_LENGTH.pack(len(one)) + one for one in packed))
    else:
        output.contents.bytes_contents.extend(packed)
