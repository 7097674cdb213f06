"""Between gRPC's messages and JSON."""

import json

import numpy
from hypothesis import given
from hypothesis import strategies as st
from tritonclient import utils

from dynamo.base import errors
from dynamo.frontend.apis.kserve import kserve_pb2, transcode

Request = kserve_pb2.ModelInferRequest


def raw_request(raw):
    request = Request(model_name="m", raw_input_contents=[raw])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    return request


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_raw_elements_of_tritons_client_are_decoded(texts):
    array = numpy.array([text.encode() for text in texts], dtype=object)
    raw = utils.serialize_byte_tensor(array).item()

    body = json.loads(transcode.encode_body(raw_request(raw)))

    assert body["inputs"][0]["data"] == texts


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_tritons_client_decodes_raw_elements(texts):
    outputs = [{"name": "text_output", "data": texts}]
    told = {"model_name": "m", "model_version": "1", "outputs": outputs}

    response = transcode.make_response(told, is_raw=True)

    found = utils.deserialize_bytes_tensor(response.raw_output_contents[0])
    assert [one.decode() for one in found] == texts


@given(st.binary(max_size=40))
def test_any_raw_bytes_are_read_or_refused_by_name(raw):
    refused = None
    try:
        transcode.encode_body(raw_request(raw))
    except errors.InvalidRequest as error:
        refused = error.param

    assert refused in (None, "text_input")


def test_each_kind_of_parameter_keeps_its_type():
    request = Request(model_name="m")
    request.parameters["a"].bool_param = True
    request.parameters["b"].int64_param = -1
    request.parameters["c"].string_param = "x"
    request.parameters["d"].double_param = 0.5
    request.parameters["e"].uint64_param = 2**63
    request.parameters["f"].SetInParent()

    found = json.loads(transcode.encode_body(request))["parameters"]

    assert found == {"a": True, "b": -1, "c": "x", "d": 0.5, "e": 2**63, "f": None}
