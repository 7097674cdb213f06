"""KServe's gRPC service, asked by Triton's own client."""

import asyncio
import shutil
import subprocess
import sys

import grpc
import numpy
import pytest
from frontend_rig import outputs
from tritonclient import utils
from tritonclient.grpc import InferInput, service_pb2, service_pb2_grpc
from tritonclient.grpc import aio as triton

from dynamo.base import errors
from dynamo.frontend.apis.kserve import inference
from dynamo.runtime.http import exchange


@pytest.fixture
async def rig(bare):
    """A frontend with gRPC and one worker."""
    await bare.start(kserve_grpc_server=True, kserve_grpc_port=0)
    bare.one = await bare.worker()
    return bare


@pytest.fixture
async def client(rig):
    async with triton.InferenceServerClient(f"127.0.0.1:{rig.frontend.grpc_port}") as made:
        yield made


@pytest.fixture
async def stub(rig):
    """The service without Triton's wrapping."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.frontend.grpc_port}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def text_input(text="hi"):
    made = InferInput("text_input", [1], "BYTES")
    made.set_data_from_numpy(numpy.array([text.encode()], dtype=object))
    return made


def streaming(is_wanted=True):
    made = InferInput("streaming", [1], "BOOL")
    made.set_data_from_numpy(numpy.array([is_wanted]))
    return made


def said(result):
    return [one.decode() for one in result.as_numpy("text_output")]


def request(text="hi", **fields):
    """Without raw contents."""
    contents = service_pb2.InferTensorContents(bytes_contents=[text.encode()])
    tensor = service_pb2.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=contents
    )
    return service_pb2.ModelInferRequest(model_name="m", inputs=[tensor], **fields)


def certificate(folder):
    """A certificate that is its own authority, and its key."""
    chain, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", chain,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return chain, key


async def stream(client, *asked):
    """All results of a stream of requests: (inputs, fields of the request)."""

    async def ask():
        for inputs, fields in asked:
            yield {"model_name": "m", "inputs": inputs, **fields}

    return [pair async for pair in client.stream_infer(ask())]


async def test_text_request_is_answered(rig, client):
    result = await client.infer(
        "m", [text_input("hällo")], request_id="7", parameters={"max_tokens": 5, "seed": 3}
    )

    assert said(result) == ["hello"]
    assert list(result.as_numpy("finish_reason")) == [b"length"]
    assert result.get_response().id == "7"
    assert rig.one.requests[0].stop_conditions.max_tokens == 5
    assert rig.one.requests[0].sampling_options.seed == 3


async def test_contents_that_are_not_raw_are_answered_likewise(stub):
    made = request(id="x")
    made.parameters["temperature"].double_param = 0.5
    made.parameters["ignore_eos"].bool_param = True
    made.parameters["stop"].string_param = "x"
    answer = await stub.ModelInfer(made)

    assert list(answer.outputs[0].contents.bytes_contents) == [b"hello"]
    assert not answer.raw_output_contents
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "x")


async def test_last_message_of_a_stream_is_marked_final(client):
    results = await stream(client, ([text_input(), streaming()], {"request_id": "7"}))

    assert all(error is None for _, error in results)
    assert "".join(text for result, _ in results for text in said(result)) == "hello"
    final = [r.get_response().parameters["triton_final_response"].bool_param for r, _ in results]
    assert final == [False] * (len(results) - 1) + [True]
    assert list(results[-1][0].as_numpy("finish_reason")) == [b"length"]
    assert {result.get_response().id for result, _ in results} == {"7"}


async def test_non_streaming_request_in_a_stream_gets_one_message(client):
    ((result, error),) = await stream(client, ([text_input(), streaming(False)], {}))

    assert error is None
    assert said(result) == ["hello"]


async def test_answer_names_parameters_without_effect(client):
    whole = await client.infer("m", [text_input()], parameters={"colour": "red"})
    asked = ([text_input(), streaming()], {"parameters": {"colour": "red"}})
    ((first, _), *_) = await stream(client, asked)

    for result in (whole, first):
        names = result.get_response().parameters["x-dynamo-ignored-parameters"].string_param
        assert names == "parameters.colour"


async def test_requests_of_one_stream_do_not_wait_for_each_other(rig, client):
    calls = []

    def say(call, _):
        calls.append(call)
        if len(calls) == 2:  # the later one is answered first
            for one, text in zip(reversed(calls), ("second", "first"), strict=True):
                for output in outputs(text):
                    one.send(output)
                one.finish()

    rig.one.script = say
    results = await stream(
        client, ([text_input()], {"request_id": "1"}), ([text_input()], {"request_id": "2"})
    )

    found = {result.get_response().id: said(result) for result, _ in results}
    assert sorted(map(str, found.values())) == ["['first']", "['second']"]


async def test_failed_request_does_not_end_its_stream(client):
    results = await stream(
        client,
        ([text_input()], {"parameters": {"temperature": 9}}),
        ([text_input()], {"request_id": "2"}),
    )

    failed = [str(error) for _, error in results if error is not None]
    assert len(failed) == 1
    assert "parameters.temperature" in failed[0]
    assert [said(result) for result, error in results if error is None] == [["hello"]]


@pytest.mark.parametrize(
    ("model", "inputs", "parameters", "code", "message"),
    [
        ("other", [text_input()], {}, "NOT_FOUND", "does not exist"),
        ("m", [text_input()], {"top_p": 2}, "INVALID_ARGUMENT", "parameters.top_p"),
        ("m", [text_input(), streaming()], {}, "INVALID_ARGUMENT", "ModelStreamInfer"),
        ("m", [streaming(False)], {}, "INVALID_ARGUMENT", "expected a tensor text_input"),
        ("m", [text_input("x" * 500)], {}, "INVALID_ARGUMENT", "maximum context length"),
    ],
)
async def test_errors_are_status_codes_with_a_sentence(
    client, model, inputs, parameters, code, message
):
    with pytest.raises(utils.InferenceServerException) as caught:
        await client.infer(model, inputs, parameters=parameters)

    assert caught.value.status() == f"StatusCode.{code}"
    assert message in caught.value.message()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Overloaded("busy"), "UNAVAILABLE"),
        (errors.EngineFailed("no memory"), "INTERNAL"),
        (errors.DeadlineExceeded("late"), "DEADLINE_EXCEEDED"),
    ],
)
async def test_worker_failure_is_a_grpc_status_code(rig, client, error, code):
    rig.one.script = lambda call, _: call.fail(error)

    with pytest.raises(utils.InferenceServerException) as caught:
        await client.infer("m", [text_input()])

    assert caught.value.status() == f"StatusCode.{code}"


@pytest.mark.parametrize("raw", [b"\x05\x00\x00\x00hi", b"\x01", b"\x02\x00\x00\x00\xff\xfe"])
async def test_raw_bytes_that_are_no_text_are_refused(stub, raw):
    tensor = service_pb2.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1]
    )
    broken = service_pb2.ModelInferRequest(
        model_name="m", inputs=[tensor], raw_input_contents=[raw]
    )

    for asked in (broken, request(raw_input_contents=[b"", b""])):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_failure_in_the_middle_is_the_last_event_of_the_stream(rig, client):
    def say(call, _):
        call.send(outputs("h", None)[0])
        call.fail(errors.EngineFailed("no memory"))

    rig.one.script = say
    results = await stream(client, ([text_input(), streaming()], {}))

    assert said(results[0][0]) == ["h"]
    assert "no memory" in str(results[-1][1])


async def test_disconnected_client_cancels_the_request_at_the_worker(rig, stub):
    rig.one.script = lambda call, _: call.send(outputs("h", None)[0])
    waiting = stub.ModelInfer(request())
    asking = rig.start_task(waiting_for(waiting))
    await rig.until(lambda: rig.one.calls)

    waiting.cancel()

    await rig.until(lambda: rig.one.num_cancelled)
    assert asking


async def waiting_for(call):
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_disconnected_stream_cancels_the_request_at_the_worker(rig, stub):
    rig.one.script = lambda call, _: call.send(outputs("h", None)[0])
    call = stub.ModelStreamInfer()
    asked = request()
    asked.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(
        True
    )
    await call.write(asked)
    first = await call.read()

    call.cancel()

    await rig.until(lambda: rig.one.num_cancelled)
    assert list(first.infer_response.outputs[0].contents.bytes_contents) == [b"h"]


async def test_message_over_the_limit_is_refused(bare):
    await bare.start(kserve_grpc_server=True, kserve_grpc_port=0, http_body_limit_mb=1)
    await bare.worker()
    async with triton.InferenceServerClient(f"127.0.0.1:{bare.frontend.grpc_port}") as client:
        with pytest.raises(utils.InferenceServerException) as caught:
            await client.infer("m", [text_input("x" * 2**21)])

    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


async def test_server_and_models_have_metadata(client):
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("m")
    assert await client.is_model_ready("m", "1")
    assert not await client.is_model_ready("m", "2")
    assert not await client.is_model_ready("other")
    server = await client.get_server_metadata()
    model = await client.get_model_metadata("m")
    config = (await client.get_model_config("m")).config

    assert server.name == "dynamo"
    assert [(one.name, one.datatype, list(one.shape)) for one in model.inputs] == [
        ("text_input", "BYTES", [1]),
        ("streaming", "BOOL", [1]),
    ]
    assert (config.backend, config.model_transaction_policy.decoupled) == ("dynamo", True)
    assert config.input[1].optional
    with pytest.raises(utils.InferenceServerException, match="does not exist"):
        await client.get_model_config("other")


async def test_drained_server_refuses_new_requests(rig, client):
    await rig.frontend.drain()

    with pytest.raises(utils.InferenceServerException) as caught:
        await client.infer("m", [text_input()])

    assert caught.value.status() == "StatusCode.UNAVAILABLE"


async def test_grpc_server_uses_the_tls_certificate_of_http(bare, tmp_path):
    chain, key = certificate(tmp_path)
    await bare.start(
        kserve_grpc_server=True,
        kserve_grpc_port=0,
        tls_cert_path=str(chain),
        tls_key_path=str(key),
    )
    address = f"localhost:{bare.frontend.grpc_port}"

    async with triton.InferenceServerClient(
        address, ssl=True, root_certificates=str(chain)
    ) as client:
        assert await client.is_server_live()


async def test_client_certificates_are_required_of_grpc_clients(bare, tmp_path):
    chain, key = certificate(tmp_path)
    await bare.start(
        kserve_grpc_server=True,
        kserve_grpc_port=0,
        tls_cert_path=str(chain),
        tls_key_path=str(key),
        tls_client_ca_cert_path=str(chain),
    )
    address = f"localhost:{bare.frontend.grpc_port}"
    shown = {"private_key": str(key), "certificate_chain": str(chain)}

    found = []
    for own in ({}, shown):
        async with triton.InferenceServerClient(
            address, ssl=True, root_certificates=str(chain), **own
        ) as client:
            try:
                found.append(await client.is_server_live())
            except utils.InferenceServerException as error:
                found.append(error.status())

    assert found == ["StatusCode.UNAVAILABLE", True]


async def test_changed_certificate_is_shown_to_grpc_clients_that_connect_then(bare, tmp_path):
    for name in ("used", "first", "second"):
        (tmp_path / name).mkdir()
    (first, key), (second, other_key) = (
        certificate(tmp_path / "first"),
        certificate(tmp_path / "second"),
    )
    used = [shutil.copy(path, tmp_path / "used") for path in (first, key)]
    await bare.start(
        kserve_grpc_server=True,
        kserve_grpc_port=0,
        tls_cert_path=str(used[0]),
        tls_key_path=str(used[1]),
    )

    async def trusting(authority):
        """Whether a client that trusts this certificate alone is answered."""
        credentials = grpc.ssl_channel_credentials(authority.read_bytes())
        address = f"localhost:{bare.frontend.grpc_port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            try:
                live = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(
                    service_pb2.ServerLiveRequest()
                )
            except grpc.aio.AioRpcError:
                return False
            return live.live

    found = [await trusting(first)]
    shutil.copy(second, used[0])
    found.append(await trusting(first))
    shutil.copy(other_key, used[1])
    found += [await trusting(second), await trusting(first)]

    assert found == [True, True, True, False]


async def test_bodies_may_be_larger_than_what_grpc_can_take(bare):
    await bare.start(kserve_grpc_server=True, kserve_grpc_port=0, http_body_limit_mb=2048)

    assert bare.frontend.grpc_port


async def test_several_processes_need_a_grpc_port_to_share(bare):
    with pytest.raises(errors.ConfigError, match="--kserve-grpc-port: expected a port that all"):
        await bare.start(kserve_grpc_server=True, kserve_grpc_port=0, http_workers=2)


async def test_grpc_port_in_use_raises_a_config_error(rig, bare):
    taken = rig.frontend.grpc_port
    with pytest.raises(errors.ConfigError, match="--kserve-grpc-port: cannot listen"):
        await bare.start(kserve_grpc_server=True, kserve_grpc_port=taken)


async def test_error_without_grpc_says_what_to_install(bare, monkeypatch):
    monkeypatch.delitem(sys.modules, "dynamo.frontend.apis.kserve.grpc_server", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(errors.ConfigError, match=r"make setup EXTRAS=kserve"):
        await bare.start(kserve_grpc_server=True)


async def test_unread_answer_is_bounded(monkeypatch):
    monkeypatch.setattr(inference, "MAX_QUEUED_EVENTS", 2)
    asked = exchange.Request(
        method="POST", path="/", query="", headers={}, body=b"", peer="somebody"
    )
    caller = inference.QueuedExchange(asked)
    told = []
    caller.on_disconnect(lambda: told.append("gone"))
    caller.start_stream(200, content_type="")

    for _ in range(5):
        caller.write(b'data: {"a":1}\n\n')

    assert told == ["gone"]
    with pytest.raises(errors.Overloaded):
        [one async for one in caller.iterate_answer()]


async def test_client_that_disconnects_during_writes_causes_no_traceback(rig, stub, caplog):
    rig.one.script = lambda call, _: [call.send(one) for one in outputs("h" * 190, None)]
    asked = request()
    asked.parameters["max_tokens"].int64_param = 195
    asked.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(
        True
    )

    for number in range(1, 21):
        call = stub.ModelStreamInfer()
        await call.write(asked)
        for _ in range(number):
            await call.read()
        call.cancel()
        await rig.until(lambda number=number: rig.one.num_cancelled == number)

    assert "Traceback" not in caplog.text
