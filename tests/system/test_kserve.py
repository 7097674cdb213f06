"""KServe's v2 protocol with real processes: Triton's client, and a client that leaves."""

import subprocess
import sys

import httpx
import numpy
from deployment import MODEL
from tritonclient import grpc as triton

import ports
from waiting import PATIENT_S, eventually


def text_input(text="Once upon a time"):
    made = triton.InferInput("text_input", [1], "BYTES")
    made.set_data_from_numpy(numpy.array([text.encode()], dtype=object))
    return made


def streaming():
    made = triton.InferInput("streaming", [1], "BOOL")
    made.set_data_from_numpy(numpy.array([True]))
    return made


def said(results):
    return "".join(result.as_numpy("text_output")[0].decode() for result in results)


def test_grpc_and_http_return_the_same(deployment):
    deployment.native()
    port = ports.reserve()
    frontend = deployment.frontend("--kserve-grpc-server", "--kserve-grpc-port", str(port))
    frontend.await_models([MODEL])
    asked = {"max_tokens": 20, "temperature": 0}
    results = []

    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        whole = client.infer(MODEL, [text_input()], parameters=asked)
        client.start_stream(lambda result, error: results.append(error or result))
        client.async_stream_infer(MODEL, [text_input(), streaming()], parameters=asked)
        client.stop_stream()
    body = {"text_input": "Once upon a time", "parameters": asked}
    plain = httpx.post(
        f"{frontend.url}/v2/models/{MODEL}/generate", json=body, timeout=PATIENT_S
    ).json()
    completion = httpx.post(
        f"{frontend.url}/v1/completions",
        json={"model": MODEL, "prompt": "Once upon a time", **asked},
        timeout=PATIENT_S,
    ).json()

    text = completion["choices"][0]["text"]
    assert text
    assert [said([whole]), said(results), plain["text_output"]] == [text] * 3
    assert len(results) > 5


def test_disconnected_client_frees_its_worker(deployment):
    worker = deployment.mocker("--tick-ms", "20")
    port = ports.reserve()
    frontend = deployment.frontend("--kserve-grpc-server", "--kserve-grpc-port", str(port))
    frontend.await_models([MODEL])
    results = []

    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: results.append(error or result))
        client.async_stream_infer(
            MODEL, [text_input(), streaming()], parameters={"max_tokens": 900, "ignore_eos": True}
        )
        eventually(lambda: results, what="the first piece")
        assert worker.metric("inflight_requests") == 1
        client.stop_stream(cancel_requests=True)

    eventually(lambda: worker.metric("inflight_requests") == 0, what="it is cancelled")
    assert "Traceback" not in frontend.log.read_text()


def test_grpc_is_not_imported_without_the_flag():
    code = (
        "import sys, dynamo.frontend.service as s; print([m for m in sys.modules if m == 'grpc'])"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"
