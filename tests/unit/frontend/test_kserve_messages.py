"""Our messages are those that Triton's client speaks: every field by name, number and type."""

import pytest
from tritonclient.grpc import service_pb2

from dynamo.frontend.apis.kserve import kserve_pb2

POOL = service_pb2.DESCRIPTOR.pool
PARTIAL = {"ModelConfig", "ModelInput", "ModelOutput"}  # fields that we do not fill are left out
OUR_PACKAGE, PUBLISHED_PACKAGE = "dynamo.kserve", "inference"
MESSAGES = kserve_pb2.DESCRIPTOR.message_types_by_name


def fields(descriptor):
    return {
        (field.name, field.number, field.type, field.is_repeated, type_of(field))
        for field in descriptor.fields
    }


def type_of(field):
    if not field.message_type:
        return None
    return field.message_type.full_name.replace(OUR_PACKAGE, PUBLISHED_PACKAGE)


@pytest.mark.parametrize("name", MESSAGES)
def test_message_has_the_published_fields(name):
    ours = fields(MESSAGES[name])
    published = fields(POOL.FindMessageTypeByName(f"{PUBLISHED_PACKAGE}.{name}"))

    assert ours <= published
    assert ours == published or name in PARTIAL


@pytest.mark.parametrize(
    "name",
    [
        "ModelMetadataResponse.TensorMetadata",
        "ModelInferRequest.InferInputTensor",
        "ModelInferRequest.InferRequestedOutputTensor",
        "ModelInferResponse.InferOutputTensor",
    ],
)
def test_nested_message_has_the_published_fields(name):
    outer, _, inner = name.partition(".")

    published = POOL.FindMessageTypeByName(f"{PUBLISHED_PACKAGE}.{name}")
    assert fields(MESSAGES[outer].nested_types_by_name[inner]) == fields(published)


def test_service_has_the_published_methods():
    ours = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    published = POOL.FindServiceByName("inference.GRPCInferenceService").methods_by_name

    for name, method in ours.items():
        for ours_type, published_type in (
            (method.input_type, published[name].input_type),
            (method.output_type, published[name].output_type),
        ):
            assert ours_type.name == published_type.name


def test_data_types_have_the_published_numbers():
    published = POOL.FindEnumTypeByName("inference.DataType").values_by_name
    field = MESSAGES["ModelInput"].fields_by_name["data_type"]

    for value in field.enum_type.values:
        assert published[value.name].number == value.number


def test_client_decodes_messages_of_the_server():
    ours = kserve_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
    ours.parameters["seed"].int64_param = 7

    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())

    assert theirs.parameters["seed"].int64_param == 7
    assert list(theirs.raw_input_contents) == [b"x"]
