"""KServe's v2 protocol over HTTP, with a worker that answers by a script."""

import json
import struct

import pytest
from frontend_rig import events, outputs

INFER = "/v2/models/m/infer"
GENERATE = "/v2/models/m/generate"


def tensor(text="hi", **fields):
    return {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text], **fields}


def flag(value):
    return {"name": "streaming", "datatype": "BOOL", "shape": [1], "data": [value]}


async def infer(rig, *inputs, path=INFER, **fields):
    return await rig.client.post(path, json={"inputs": inputs or [tensor()], **fields})


async def test_text_input_and_output_are_tensors(rig):
    answer = await infer(rig, id="seven", parameters={"max_tokens": 5})

    assert answer.json() == {
        "model_name": "m",
        "model_version": "1",
        "id": "seven",
        "outputs": [
            {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["hello"]},
            {"name": "finish_reason", "datatype": "BYTES", "shape": [1], "data": ["length"]},
        ],
    }
    assert rig.one.prompts == ["hi"]
    assert rig.one.requests[0].stop_conditions.max_tokens == 5


async def test_parameters_equal_those_of_completions(rig):
    parameters = {"temperature": 0.5, "seed": 3, "stop": "x", "top_k": 7, "ignore_eos": True}

    await infer(rig, parameters=parameters)

    options = rig.one.requests[0].sampling_options
    assert (options.temperature, options.seed, options.top_k) == (0.5, 3, 7)
    assert rig.one.requests[0].stop_conditions.ignore_eos


async def test_several_choices_are_several_elements(rig):
    def say(call, request):
        for index, text in enumerate(("one", "two")):
            for output in outputs(text, "length", index):
                call.send(output)
        call.finish()

    rig.one.script = say
    answer = await infer(rig, parameters={"n": 2})
    plain = await rig.client.post(GENERATE, json={"text_input": "hi", "parameters": {"n": 2}})

    assert answer.json()["outputs"][0]["data"] == ["one", "two"]
    assert plain.json()["text_output"] == ["one", "two"]


async def test_generate_needs_no_tensors(rig):
    answer = await rig.client.post(GENERATE, json={"text_input": "hi", "id": "7"})

    assert answer.json() == {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
        "text_output": "hello",
        "finish_reason": "length",
    }


async def test_parameters_may_stand_beside_the_text_as_for_tensorrt_llm(rig):
    beside = {"max_tokens": 20, "bad_words": "", "stop_words": ["x"], "random_seed": 5}
    await rig.client.post(GENERATE, json={"text_input": "hi", **beside})
    await rig.client.post(
        GENERATE, json={"text_input": "hi", "max_tokens": 1, "parameters": {"max_tokens": 2}}
    )

    first, second = rig.one.requests
    assert first.stop_conditions.max_tokens == 20
    assert first.stop_conditions.stop == ("x",)
    assert first.sampling_options.seed == 5
    assert second.stop_conditions.max_tokens == 2


async def test_generate_stream_ends_with_the_finish_reason(rig):
    answer = await rig.client.post(GENERATE + "_stream", json={"text_input": "hi"})

    told = events(answer.text)
    assert "".join(one["text_output"] for one in told) == "hello"
    assert told[0]["model_name"] == "m"
    assert [one.get("finish_reason") for one in told[-2:]] == [None, "length"]


async def test_infer_stream_sends_tensors(rig):
    whole = await infer(rig, tensor(), flag(False), path=INFER + "_stream")
    answer = await infer(rig, tensor(), flag(True), path=INFER + "_stream", id="7")

    told = events(answer.text)
    assert "".join(one["outputs"][0]["data"][0] for one in told) == "hello"
    assert told[-1]["outputs"][1]["data"] == ["length"]
    assert {one["id"] for one in told} == {"7"}
    assert whole.json()["outputs"][0]["data"] == ["hello"]


@pytest.mark.parametrize("path", ["/v2/models/m/versions/1/infer", INFER])
async def test_request_may_name_version_1(rig, path):
    assert (await infer(rig, path=path)).status_code == 200


async def test_kserve_model_name_may_contain_slashes(bare):
    await bare.start()
    await bare.worker("org/m-7b")

    answer = await infer(bare, path="/v2/models/org/m-7b/versions/1/infer")
    described = await bare.client.get("/v2/models/org/m-7b")

    assert answer.json()["model_name"] == described.json()["name"] == "org/m-7b"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": []}, "inputs: expected a tensor text_input, got none"),
        ({"inputs": [tensor(), tensor()]}, "got one twice"),
        ({"inputs": [tensor(name="prompt")]}, "got 'prompt'"),
        ({"inputs": [tensor(shape=[2], data=["a", "b"])]}, "expected BYTES of shape [1]"),
        ({"inputs": [tensor(datatype="FP32", data=[1])]}, "got FP32 of shape [1]"),
        ({"inputs": [tensor(data=[7])]}, "text_input: expected one str, got 7"),
        ({"inputs": [tensor(), flag(True)]}, "ModelStreamInfer (gRPC), infer_stream"),
        ({"inputs": [tensor()], "outputs": [{"name": "logits"}]}, "got 'logits'"),
        ({"inputs": [tensor()], "parameters": {"temperature": 9}}, "parameters.temperature"),
        ({"inputs": [tensor()], "parameters": {"logprobs": 1}}, "parameters.logprobs: not"),
        ({"inputs": [tensor()], "parameters": {"prompt_logprobs": 1}}, "prompt_logprobs: not"),
        ({"inputs": [tensor()], "parameters": {"return_token_ids": True}}, "token_ids: not"),
        ({"inputs": [tensor()], "parameters": {"tool_choice": "auto"}}, "tool_choice: not"),
        ({"inputs": [tensor()], "parameters": {"model": "x"}}, "parameters.model: not supported"),
        ({"inputs": [tensor("x" * 300)]}, "maximum context length is 200"),
    ],
)
async def test_invalid_infer_request_is_a_400(rig, fields, message):
    answer = await rig.client.post(INFER, json=fields)

    assert answer.status_code == 400
    assert message in answer.json()["error"]
    assert not rig.one.requests


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (GENERATE, {"stream": True}, "stream: expected false or nothing at this route"),
        (
            GENERATE + "_stream",
            {"parameters": {"stream": False}},
            "parameters.stream: expected true",
        ),
        (GENERATE + "_stream", {"parameters": {"n": 2}}, "expected 1 in a stream, got 2"),
        (GENERATE, {"text_input": 5}, "text_input"),
        (GENERATE, {"max_tokens": -1}, "parameters.max_tokens: expected a whole number"),
    ],
)
async def test_invalid_generate_request_is_a_400(rig, path, fields, message):
    answer = await rig.client.post(path, json={"text_input": "hi", **fields})

    assert answer.status_code == 400
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/other/infer", 404),
        ("POST", "/v2/models/m/versions/2/infer", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/m/versions/2/config", 404),
        ("GET", "/v2/models/m/infer", 405),
        ("POST", "/v2/models/m/config", 405),
        ("POST", "/v2/models/", 405),
        ("GET", "/v2/nothing", 404),
    ],
)
async def test_missing_model_or_route_is_an_error_in_the_protocols_form(rig, method, path, status):
    answer = await rig.client.request(method, path, json={"inputs": [tensor()]})

    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)


async def test_path_below_a_model_is_not_read_as_the_name_of_another(rig):
    answer = await rig.client.get("/v2/models/m/stats")

    assert answer.json() == {"error": "no such path: GET /v2/models/m/stats"}


def raw_tensor(size, **fields):
    described = {"name": "text_input", "datatype": "BYTES", "shape": [1], **fields}
    return {**described, "parameters": {"binary_data_size": size}}


async def infer_raw(rig, inputs, raw, length=None):
    body = json.dumps({"inputs": inputs}).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(body) if length is None else length),
        "Content-Type": "application/octet-stream",
    }
    return await rig.client.post(INFER, content=body + raw, headers=headers)


async def test_tensors_may_follow_as_raw_bytes(rig):
    no = {"name": "streaming", "datatype": "BOOL"}
    answer = await infer_raw(
        rig, [raw_tensor(6), raw_tensor(1, **no)], struct.pack("<I", 2) + b"hi" + b"\0"
    )

    assert answer.json()["outputs"][0]["data"] == ["hello"]
    assert rig.one.prompts == ["hi"]


@pytest.mark.parametrize(
    ("inputs", "raw", "length", "text"),
    [
        (
            [raw_tensor(7)],
            struct.pack("<I", 2) + b"hi",
            None,
            "binary_data_size within the 6 bytes",
        ),
        ([raw_tensor("6")], struct.pack("<I", 2) + b"hi", None, "binary_data_size"),
        ([raw_tensor(6)], struct.pack("<I", 3) + b"hi", None, "text_input"),
        ([raw_tensor(5)], struct.pack("<I", 1) + b"\xff", None, "UTF-8"),
        ([raw_tensor(6)], b"", 999, "expected inference-header-content-length within"),
        ([raw_tensor(6)], b"", "x", "'x'"),
    ],
)
async def test_wrong_raw_tensor_is_refused(rig, inputs, raw, length, text):
    answer = await infer_raw(rig, inputs, raw, length)

    assert answer.status_code == 400
    assert text in answer.json()["error"]


async def test_server_and_models_have_http_metadata(rig):
    server = (await rig.client.get("/v2")).json()
    model = (await rig.client.get("/v2/models/m")).json()
    config = (await rig.client.get("/v2/models/m/config")).json()
    live = await rig.client.get("/v2/health/live")
    ready = [await rig.client.get(path) for path in ("/v2/health/ready", "/v2/models/m/ready")]

    assert server["name"] == "dynamo"
    assert [one["name"] for one in model["inputs"]] == ["text_input", "streaming"]
    assert [one["shape"] for one in model["outputs"]] == [[-1], [-1]]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert live.json() == {"live": True}
    assert [one.status_code for one in ready] == [200, 200]


async def test_without_a_model_the_server_is_not_ready(bare):
    await bare.start()

    assert (await bare.client.get("/v2/health/ready")).status_code == 503
    assert (await bare.client.get("/v2/models/m/ready")).status_code == 503


async def test_draining_server_is_not_ready(rig):
    await rig.frontend.drain()

    assert (await rig.client.get("/v2/health/ready")).status_code == 503
    assert (await infer(rig)).status_code == 503


async def test_embedding_model_is_refused(bare):
    await bare.start()
    await bare.embedder()

    answer = await infer(bare, path="/v2/models/e/infer")
    described = await bare.client.get("/v2/models/e")

    assert (answer.status_code, described.status_code) == (400, 400)
    assert "makes embeddings, not text" in answer.json()["error"]


async def test_infer_request_is_counted_as_a_completion(rig):
    await infer(rig)

    found = await rig.metrics()
    labels = 'endpoint="completions",error_type="",model="m",request_type="unary",status="success"'
    assert found[f"dynamo_frontend_requests_total{{{labels}}}"] == 1
