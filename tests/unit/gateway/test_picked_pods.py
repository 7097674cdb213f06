"""The endpoint picker before a frontend that is not there: what it asks, and the pod that a request gets."""

import gzip
import json
import threading

import pytest

from dynamo.base import errors
from dynamo.gateway import endpoint_picker
from dynamo.gateway import ext_proc_pb2 as messages

WORKERS = {7: "10.0.0.7", 8: "10.0.0.8"}


class Frontend:
    """Answers the questions of the picker, and keeps them; it has a key if `key` is set, and has lost `down`.

    As the real one, it tells no log probabilities of prompts in a stream.
    """

    def __init__(self):
        self.asked = []
        self.key = None
        self.down = ()
        self.is_busy = False

    async def request(self, method, url, content=b"", *, timeout_s, headers, response_headers):
        self.asked.append((method, url.removeprefix("http://127.0.0.1:8000"), content, headers))
        is_known = self.key is None or headers.get("authorization") == f"Bearer {self.key}"
        if method == "GET":
            instances = [
                {
                    "instance_id": number,
                    "endpoint": "generate",
                    "state": "down" if number in self.down else "ready",
                    "transport": {"tcp": f"tcp://{host}:1234"},
                }
                for number, host in WORKERS.items()
            ]
            return 200, json.dumps({"instances": instances} if is_known else {}).encode()
        if not is_known:
            return 401, b'{"error": {}}'
        if self.is_busy:
            response_headers.update({"retry-after": "7", "content-length": "2"})
            return 429, b"{}"
        if json.loads(content)["stream"] and "prompt_logprobs" in json.loads(content):
            return 400, b'{"error": {}}'
        return 200, b'event: worker_instance_id\n: "8"\n\n'


@pytest.fixture
def frontend(monkeypatch):
    made = Frontend()
    monkeypatch.setattr(endpoint_picker.client, "request", made.request)
    return made


@pytest.fixture
def picker(frontend):
    questions = endpoint_picker.FrontendQuestions(endpoint_picker.EndpointPickerConfig())
    return lambda: endpoint_picker.PickingProcessor(questions)


async def pick(stream, path, body=None, **headers):
    """The headers that a request gets, or the status of its answer."""
    answers = await answers_of(stream, path, body, **headers)
    if answers[0].HasField("immediate_response"):
        return answers[0].immediate_response.status.code
    mutation = answers[0].request_headers.response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


async def answers_of(stream, path, body=None, subset=None, mode=4, **headers):
    """The answers to headers and body of a request; `subset` are the endpoints that the gateway allows."""
    values = {":method": "POST", ":path": path, **headers}
    head = messages.HttpHeaders(
        headers=messages.HeaderMap(
            headers=[
                messages.HeaderValue(key=name, raw_value=value.encode())
                for name, value in values.items()
            ]
        ),
        end_of_stream=body is None,
    )
    protocol = messages.ProtocolConfiguration(request_body_mode=mode)
    first = messages.ProcessingRequest(request_headers=head, protocol_config=protocol)
    if subset is not None:
        namespace = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        namespace.update({"x-gateway-destination-endpoint-subset": subset})
    answers = await stream.process(first)
    if body is not None:
        whole = messages.HttpBody(body=body, end_of_stream=True)
        answers += await stream.process(messages.ProcessingRequest(request_body=whole))
    return answers


async def test_worker_that_the_frontend_chooses_gets_the_request(picker):
    headers = await pick(picker(), "/v1/completions", b'{"model": "a", "prompt": "b"}')

    assert headers == {
        endpoint_picker.DESTINATION: "10.0.0.8:8000",
        endpoint_picker.WORKER: "8",
    }


async def test_compressed_request_is_read_and_goes_on_as_it_came(picker, frontend):
    body = gzip.compress(b'{"model": "a", "prompt": "b"}')

    answers = await answers_of(picker(), "/v1/completions", body, **{"content-encoding": "gzip"})

    assert json.loads(frontend.asked[0][2])["prompt"] == "b"
    assert answers[1].request_body.response.body_mutation.streamed_response.body == body
    set_headers = answers[0].request_headers.response.header_mutation.set_headers
    assert {option.header.raw_value for option in set_headers} == {b"10.0.0.8:8000", b"8"}


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_pod_says_what_is_wrong_with_a_compressed_request(picker, frontend, encoding):
    headers = await pick(picker(), "/v1/completions", b"{}", **{"content-encoding": encoding})

    assert headers[endpoint_picker.DESTINATION] == "10.0.0.7:8000"
    assert [method for method, *_ in frontend.asked] == ["GET"]


async def test_large_request_is_decoded_beside_the_event_loop(picker, frontend, monkeypatch):
    make_question, threads = endpoint_picker._make_question, []
    monkeypatch.setattr(
        endpoint_picker,
        "_make_question",
        lambda body: threads.append(threading.current_thread()) or make_question(body),
    )
    body = b'{"model": "a", "prompt": "%s"}' % (b"b" * 2**19)

    headers = await pick(picker(), "/v1/completions", body)

    assert headers[endpoint_picker.WORKER] == "8"
    assert threads[0] is not threading.main_thread()


async def test_question_has_all_but_the_extensions_as_it_came(picker, frontend):
    """Decoded, a body of 64 MiB takes gigabytes."""
    body = b'{"prompt": [1.50 , {"a":1e999}], "stream": 5, "nvext": {"annotations": ["token_ids"]}}'

    await pick(picker(), "/v1/completions", body)

    asked = frontend.asked[0][2]
    assert b'"prompt":[1.50 , {"a":1e999}]' in asked
    assert json.loads(asked)["stream"] is True
    assert json.loads(asked)["nvext"] == {"annotations": ["token_ids", "query_instance_id"]}


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/embeddings", "/v1/rerank", "/v2/models/a/infer", "/tokenize"]
)
async def test_request_in_an_api_that_cannot_ask_for_a_worker_goes_to_each_pod_in_turn(
    picker, path
):
    found = [await pick(picker(), path, b'{"model": "a"}') for _ in range(2)]

    assert [headers[endpoint_picker.DESTINATION] for headers in found] == [
        "10.0.0.7:8000",
        "10.0.0.8:8000",
    ]
    # a frontend in direct mode refuses a prompt that names no worker
    assert [headers[endpoint_picker.WORKER] for headers in found] == ["7", "8"]


@pytest.mark.parametrize("body", [None, b"{}"])
async def test_list_of_models_is_asked_of_a_pod(picker, body):
    headers = await pick(picker(), "/v1/models", body, **{":method": "GET"})

    assert headers[endpoint_picker.DESTINATION] == "10.0.0.7:8000"


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"nvext": 1}', b'{"nvext": {"annotations": 1}}', b"[" * 5000]
)
async def test_pod_says_what_is_wrong_with_a_request(picker, frontend, body):
    headers = await pick(picker(), "/v1/chat/completions", body)

    assert headers[endpoint_picker.DESTINATION] == "10.0.0.7:8000"
    assert [method for method, *_ in frontend.asked] == ["GET"]


async def test_request_that_only_a_stream_may_not_be_goes_to_a_pod(picker):
    body = b'{"model": "a", "prompt": "b", "prompt_logprobs": 1, "stream": false}'

    headers = await pick(picker(), "/v1/completions", body)

    assert headers[endpoint_picker.DESTINATION] == "10.0.0.7:8000"


@pytest.mark.parametrize("mode", [0, 1, 3])
async def test_request_whose_body_does_not_come_whole_goes_to_any_pod(picker, mode, caplog):
    headers = await pick(picker(), "/v1/completions", b'{"model": "a", "prompt": "b"}', mode=mode)

    assert headers[endpoint_picker.DESTINATION] == "10.0.0.7:8000"
    assert "request_body_mode" in caplog.text


async def test_frontend_is_asked_with_the_key_of_the_client(picker, frontend):
    frontend.key = "secret"
    body = b'{"model": "a", "prompt": "b"}'
    allowed = await pick(picker(), "/v1/completions", body, authorization="Bearer secret")
    listed = await pick(picker(), "/v1/models", authorization="Bearer secret")
    refused = await pick(picker(), "/v1/completions", body, authorization="Bearer wrong")

    assert allowed[endpoint_picker.WORKER] == "8"
    assert listed[endpoint_picker.DESTINATION] == "10.0.0.7:8000"
    assert refused == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_metadata_of_the_answer_name_the_endpoint_of_the_header(picker, path):
    first, *rest = await answers_of(picker(), path, b'{"model": "a", "prompt": "b"}')

    (option, _) = first.request_headers.response.header_mutation.set_headers
    named = first.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert named == option.header.raw_value.decode()
    assert not any(answer.HasField("dynamic_metadata") for answer in rest)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("subset", [["10.0.0.7:8000", "10.9.9.9:8000"], "10.0.0.7:8000"])
async def test_request_goes_to_an_endpoint_that_the_gateway_allows(picker, path, subset):
    body = b'{"model": "a", "prompt": "b"}'  # the frontend would choose 10.0.0.8

    for _ in range(2):
        headers = await pick(picker(), path, body, subset=subset)

        assert headers[endpoint_picker.DESTINATION] == "10.0.0.7:8000"
        assert headers[endpoint_picker.WORKER] == "7"


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"]])
async def test_request_is_refused_where_the_gateway_allows_no_worker(picker, subset):
    assert await pick(picker(), "/v1/completions", b"{}", subset=subset) == 503


async def test_body_in_an_api_that_cannot_ask_for_a_worker_passes_piece_by_piece(picker):
    stream, pieces = picker(), []
    await pick(stream, "/v1/files", b"x" * 6000)
    for _ in range(2):  # more than the picker would read of a request
        piece = messages.ProcessingRequest(request_body=messages.HttpBody(body=b"x" * 6000))
        pieces += await stream.process(piece)

    bodies = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
    assert [len(body.body) for body in bodies] == [6000, 6000]


async def test_worker_that_the_frontend_has_lost_gets_no_turn(picker, frontend):
    frontend.down = (7,)

    found = [await pick(picker(), "/v1/responses", b"{}") for _ in range(2)]

    assert {headers[endpoint_picker.WORKER] for headers in found} == {"8"}


async def test_client_is_told_when_to_try_again_as_the_frontend_says(picker, frontend):
    frontend.is_busy = True

    (answer,) = await answers_of(picker(), "/v1/completions", b'{"model": "a", "prompt": "b"}')

    options = answer.immediate_response.headers.set_headers
    headers = {option.header.key: option.header.raw_value.decode() for option in options}
    assert headers == {"content-type": "application/json", "retry-after": "7"}


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/"])
async def test_frontend_may_be_named_by_its_url(frontend, address):
    settings = endpoint_picker.EndpointPickerConfig(frontend=address)
    questions = endpoint_picker.FrontendQuestions(settings)

    await pick(endpoint_picker.PickingProcessor(questions), "/v1/models")

    assert [path for _, path, *_ in frontend.asked] == ["/health"]


@pytest.mark.parametrize("address", ["", ":8000", "host:port", "ftp://host"])
def test_address_that_is_none_is_refused_at_the_start(address):
    settings = endpoint_picker.EndpointPickerConfig(frontend=address)

    with pytest.raises(errors.ConfigError, match="--frontend"):
        endpoint_picker.FrontendQuestions(settings)
