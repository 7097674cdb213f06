"""vLLM's own spans of a request are below the worker's, in the trace of the client."""

import importlib.util

import httpx
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)
if importlib.util.find_spec("opentelemetry.sdk") is None:
    pytest.skip("opentelemetry-sdk is not installed here", allow_module_level=True)

from deployment import Deployment, chat

import collector
import vllm_models
from waiting import PATIENT_S, eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
MODEL = "qwen3-tiny"
FLAGS = (
    f"--model-name {MODEL} --enforce-eager --dtype float32 --block-size 32 --max-model-len 256"
    " --num-gpu-blocks-override 40 --max-num-seqs 4 --max-num-batched-tokens 256"
)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
START_S = 600.0  # on a busy machine; usually half a minute


def test_spans_of_vllm_are_below_those_of_the_worker(tmp_path):
    deployment = Deployment(tmp_path)
    with collector.running() as found:
        deployment.environ |= {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": found.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",  # vLLM's default is gRPC
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        try:
            model = str(vllm_models.make(tmp_path / "model"))
            worker = deployment.vllm(
                "--model", model, *FLAGS.split(), "--otlp-traces-endpoint", found.endpoint
            )
            frontend = deployment.frontend()
            frontend.others = [worker]
            eventually(
                lambda: frontend.is_live() and frontend.models() == [MODEL],
                within_s=START_S,
                what="the model",
                every_s=0.5,
            )
            answer = httpx.post(
                f"{frontend.url}/v1/chat/completions",
                json=chat("hi", model=MODEL, max_tokens=4),
                headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
                timeout=PATIENT_S,
            )
            assert answer.status_code == 200, answer.text
            spans = found.await_names("http-request", "handle_payload", "llm_request")
        finally:
            deployment.end()

    assert spans["llm_request"].trace_id.hex() == TRACE
    assert spans["llm_request"].parent_span_id == spans["handle_payload"].span_id
