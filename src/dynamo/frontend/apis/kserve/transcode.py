"""Translation between gRPC's messages and the JSON of the HTTP routes.

So requests are decoded and checked in one place, and gRPC cannot differ from HTTP except in its encoding. Tensors come
in `contents` or as raw bytes (an element of BYTES is its length, 32 bits little-endian, and then itself); the answer
has the form of the request.
"""  # decider

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis.kserve import kserve_pb2
from dynamo.frontend.apis.kserve import request as kserve

FINAL = "triton_final_response"


def encode_body(request: Any) -> bytes:
    """Return a ModelInferRequest as JSON. Raises InvalidRequest for what JSON cannot express."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise errors.InvalidRequest.of_param(
            "raw_input_contents",
            f"expected one for each of {len(request.inputs)} inputs, got {len(raw)}",
        )
    inputs = [
        _decode_input(tensor, raw[place] if raw else None)
        for place, tensor in enumerate(request.inputs)
    ]
    parameters = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        parameters[name] = getattr(parameter, kind) if kind else None
    body: dict[str, Any] = {
        "inputs": inputs,
        "parameters": parameters,
        "outputs": [{"name": output.name} for output in request.outputs],
    }
    if request.id:
        body["id"] = request.id
    return msgspec.json.encode(body)


def make_response(answer: Mapping[str, Any], *, is_raw: bool) -> Any:
    """Return an answer of `InferFormatter` as a ModelInferResponse."""
    response = kserve_pb2.ModelInferResponse(
        model_name=answer["model_name"],
        model_version=answer["model_version"],
        id=answer.get("id", ""),
    )
    for name, text in answer.get("parameters", {}).items():
        response.parameters[name].string_param = text
    for tensor in answer["outputs"]:
        elements = [element.encode() for element in tensor["data"]]
        output = response.outputs.add(name=tensor["name"], datatype="BYTES", shape=[len(elements)])
        if is_raw:
            packed = (kserve.LENGTH.pack(len(element)) + element for element in elements)
            response.raw_output_contents.append(b"".join(packed))
        else:
            output.contents.bytes_contents.extend(elements)
    return response


def make_stream_response(answer: Mapping[str, Any], *, is_raw: bool, request_id: str) -> Any:
    """Return an event of a stream as a ModelStreamInferResponse; the last one is marked as final."""
    if "error" in answer:
        return make_failure(answer["error"], request_id)
    response = make_response(answer, is_raw=is_raw)
    is_last = any(output["name"] == kserve.FINISH_REASON for output in answer["outputs"])
    response.parameters[FINAL].bool_param = is_last
    return kserve_pb2.ModelStreamInferResponse(infer_response=response)


def make_failure(message: str, request_id: str) -> Any:
    """Return the error of one request of a stream, which itself goes on."""
    return kserve_pb2.ModelStreamInferResponse(
        error_message=message, infer_response=kserve_pb2.ModelInferResponse(id=request_id)
    )


def _decode_input(tensor: Any, raw: bytes | None) -> dict[str, Any]:
    name, datatype = tensor.name, tensor.datatype
    data: list[Any] = []
    if raw is not None:
        data = kserve.read_raw(name, datatype, raw)
    elif datatype == "BOOL":
        data = list(tensor.contents.bool_contents)
    elif datatype == "BYTES":
        data = [kserve.decode_text(name, element) for element in tensor.contents.bytes_contents]
    shape = list(tensor.shape)
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}
