"""The messages of KServe's gRPC service, and Triton's ModelConfig as far as we fill it.

Names and numbers are those that KServe and Triton publish (`grpc_predict_v2.proto`, `grpc_service.proto`,
`model_config.proto`); they are the protocol, and say more in a table than in generated code. The table is read at
import, into a pool of its own: the default one may hold a client's messages of the same names.

This is the one door to protobuf.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
_TENSOR_METADATA = "ModelMetadataResponse.TensorMetadata"
_IN, _OUT = "ModelInferRequest.InferInputTensor", "ModelInferResponse.InferOutputTensor"
_PARAMETERS = "map<InferParameter> parameters"
_FIELDS: dict[str, tuple[str, ...]] = {  # message → "[repeated | map<value>] type name number"
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("bool live 1",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("bool ready 1",),
    "ModelReadyRequest": ("string name 1", "string version 2"),
    "ModelReadyResponse": ("bool ready 1",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("string name 1", "string version 2", "repeated string extensions 3"),
    "ModelMetadataRequest": ("string name 1", "string version 2"),
    "ModelMetadataResponse": (
        "string name 1",
        "repeated string versions 2",
        "string platform 3",
        f"repeated {_TENSOR_METADATA} inputs 4",
        f"repeated {_TENSOR_METADATA} outputs 5",
    ),
    _TENSOR_METADATA: ("string name 1", "string datatype 2", "repeated int64 shape 3"),
    "InferParameter": (
        "oneof bool bool_param 1",
        "oneof int64 int64_param 2",
        "oneof string string_param 3",
        "oneof double double_param 4",
        "oneof uint64 uint64_param 5",
    ),
    "InferTensorContents": (
        "repeated bool bool_contents 1",
        "repeated int32 int_contents 2",
        "repeated int64 int64_contents 3",
        "repeated uint32 uint_contents 4",
        "repeated uint64 uint64_contents 5",
        "repeated float fp32_contents 6",
        "repeated double fp64_contents 7",
        "repeated bytes bytes_contents 8",
    ),
    "ModelInferRequest": (
        "string model_name 1",
        "string model_version 2",
        "string id 3",
        f"{_PARAMETERS} 4",
        f"repeated {_IN} inputs 5",
        "repeated ModelInferRequest.InferRequestedOutputTensor outputs 6",
        "repeated bytes raw_input_contents 7",
    ),
    _IN: (
        "string name 1",
        "string datatype 2",
        "repeated int64 shape 3",
        f"{_PARAMETERS} 4",
        "InferTensorContents contents 5",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": ("string name 1", f"{_PARAMETERS} 2"),
    "ModelInferResponse": (
        "string model_name 1",
        "string model_version 2",
        "string id 3",
        f"{_PARAMETERS} 4",
        f"repeated {_OUT} outputs 5",
        "repeated bytes raw_output_contents 6",
    ),
    _OUT: (
        "string name 1",
        "string datatype 2",
        "repeated int64 shape 3",
        f"{_PARAMETERS} 4",
        "InferTensorContents contents 5",
    ),
    "ModelStreamInferResponse": ("string error_message 1", "ModelInferResponse infer_response 2"),
    "ModelConfigRequest": ("string name 1", "string version 2"),
    "ModelConfigResponse": ("ModelConfig config 1",),
    "ModelConfig": (
        "string name 1",
        "string platform 2",
        "int32 max_batch_size 4",
        "repeated ModelInput input 5",
        "repeated ModelOutput output 6",
        "string backend 17",
        "ModelTransactionPolicy model_transaction_policy 19",
    ),
    "ModelInput": (
        "string name 1",
        "DataType data_type 2",
        "repeated int64 dims 4",
        "bool optional 8",
    ),
    "ModelOutput": ("string name 1", "DataType data_type 2", "repeated int64 dims 3"),
    "ModelTransactionPolicy": ("bool decoupled 1",),
}
_ENUMS = {"DataType": {"TYPE_INVALID": 0, "TYPE_BOOL": 1, "TYPE_STRING": 13}}
_FIELD = re.compile(
    r"(?P<kind>repeated|oneof|map)?(?: |<)?(?P<type>[\w.]+)>? (?P<name>\w+) (?P<number>\d+)"
)
_Proto = descriptor_pb2.FieldDescriptorProto
_SCALARS = frozenset(_Proto.Type.keys())
_ONEOF = "parameter_choice"


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="kserve.proto", package=PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for label, number in values.items():
            enum.value.add(name=label, number=number)
    by_name: dict[str, Any] = {}
    for path in sorted(_FIELDS, key=lambda path: path.count(".")):  # what holds others comes first
        outer, _, name = path.rpartition(".")
        message = by_name[outer].nested_type.add() if outer else file.message_type.add()
        message.name = name
        by_name[path] = message
    for path, fields in _FIELDS.items():
        for field in fields:
            _add_field(by_name[path], path, field)
    return file


def _add_field(message: Any, path: str, text: str) -> None:
    found = _FIELD.fullmatch(text)
    assert found is not None, text
    kind, type_name = found["kind"], found["type"]
    field = message.field.add(
        name=found["name"], number=int(found["number"]), label=_Proto.LABEL_OPTIONAL
    )
    if kind == "map":
        entry = _add_map_entry(message, found["name"], type_name)
        field.label, type_name = _Proto.LABEL_REPEATED, f"{path}.{entry}"
    elif kind == "repeated":
        field.label = _Proto.LABEL_REPEATED
    elif kind == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name=_ONEOF)
        field.oneof_index = 0
    _set_type(field, type_name)


def _add_map_entry(message: Any, name: str, value_type: str) -> str:
    """A map is a repeated message of keys and values."""
    entry = message.nested_type.add(name=f"{name.title()}Entry")
    entry.options.map_entry = True
    for number, (part, part_type) in enumerate((("key", "string"), ("value", value_type)), 1):
        field = entry.field.add(name=part, number=number, label=_Proto.LABEL_OPTIONAL)
        _set_type(field, part_type)
    return str(entry.name)


def _set_type(field: Any, type_name: str) -> None:
    scalar = f"TYPE_{type_name.upper()}"
    if scalar in _SCALARS:
        field.type = _Proto.Type.Value(scalar)
        return
    field.type = _Proto.TYPE_ENUM if type_name in _ENUMS else _Proto.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{type_name}"


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())
CLASS_BY_NAME: dict[str, Any] = {
    path: message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{path}"))
    for path in _FIELDS
}
