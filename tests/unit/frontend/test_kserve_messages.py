"""Our messages are those that Triton's client speaks: every field by name, number and type."""

import pytest
from tritonclient.grpc import service_pb2

from dynamo.frontend.apis.kserve import messages

POOL = service_pb2.DESCRIPTOR.pool
PARTIAL = {"ModelConfig", "ModelInput", "ModelOutput"}  # what we do not fill is left out


def fields(descriptor):
    return {
        (field.name, field.number, field.type, field.is_repeated, type_of(field))
        for field in descriptor.fields
    }


def type_of(field):
    return field.message_type.full_name if field.message_type else None


@pytest.mark.parametrize("name", messages.CLASS_BY_NAME)
def test_a_message_has_the_published_fields(name):
    ours = fields(messages.CLASS_BY_NAME[name].DESCRIPTOR)
    published = fields(POOL.FindMessageTypeByName(f"{messages.PACKAGE}.{name}"))

    assert ours <= published
    assert ours == published or name in PARTIAL


def test_data_types_have_the_published_numbers():
    published = POOL.FindEnumTypeByName("inference.DataType").values_by_name
    field = messages.CLASS_BY_NAME["ModelInput"].DESCRIPTOR.fields_by_name["data_type"]

    for value in field.enum_type.values:
        assert published[value.name].number == value.number


def test_what_we_write_their_class_reads():
    ours = messages.CLASS_BY_NAME["ModelInferRequest"](model_name="m", raw_input_contents=[b"x"])
    ours.parameters["seed"].int64_param = 7

    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())

    assert theirs.parameters["seed"].int64_param == 7
    assert list(theirs.raw_input_contents) == [b"x"]
