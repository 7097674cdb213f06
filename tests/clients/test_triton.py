"""tritonclient: HTTP with binary tensors, which is its default, HTTP with JSON, and gRPC."""

import numpy
import pytest

http = pytest.importorskip("tritonclient.http")
grpc = pytest.importorskip("tritonclient.grpc")


def ask(protocol, client, model, **options):
    tensor = protocol.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(numpy.array([b"Once upon a time"], dtype=object), **options)
    answer = client.infer(model, [tensor], parameters={"max_tokens": 9})
    return answer.as_numpy("text_output")[0]


@pytest.mark.parametrize("binary_data", [True, False])
def test_http_client_gets_a_text(server, binary_data):
    with http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        assert client.is_server_ready()
        assert client.is_model_ready(server.model)
        assert client.get_model_metadata(server.model)["name"] == server.model
        assert ask(http, client, server.model, binary_data=binary_data)


def test_grpc_client_gets_a_text(server):
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        assert client.is_server_ready()
        assert client.is_model_ready(server.model)
        assert ask(grpc, client, server.model)
