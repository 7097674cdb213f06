"""A worker with cache tiers is killed and started again; the disk remembers, and the answer is the same."""

import signal
import subprocess
import sys

import httpx
import pytest
from deployment import MODEL

import collector
from waiting import PATIENT_S, eventually

PROMPT = " ".join(f"Tell me the story of the cat number {i}." for i in range(40))
FIELDS = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}


def start(deployment, directory, *flags):
    worker = deployment.native(
        "--connector", "kvbm", "--kvbm-storage-tiers", "hbm,host_dram,nvme_ssd",
        "--kvbm-cpu-cache-gb", "100MB", "--kvbm-disk-cache-gb", "200MB", "--kvbm-nvme-path", str(directory),
        *flags,
    )  # fmt: skip
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.others = [worker]
    frontend.await_models([MODEL])
    return frontend, worker


def ask(frontend, prompt=PROMPT):
    answer = frontend.chat(prompt, nvext={"extra_fields": ["timing"]}, **FIELDS).json()
    timing = answer["nvext"]["timing"]
    return answer["choices"][0]["message"]["content"], timing.get("kv_tier_tokens", {})


def report(worker):
    return httpx.get(f"{worker.url}/kvbm", timeout=PATIENT_S).json()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_restarted_worker_loads_its_first_long_prompt_from_disk(deployment, tmp_path, how):
    frontend, worker = start(deployment, tmp_path / "cache")
    said, loaded = ask(frontend)
    eventually(
        lambda: report(worker)["copied"]["offload_blocks_h2d"] > 20,
        what="blocks on disk",
    )
    worker.signal(how)
    worker.popen.wait(PATIENT_S)
    frontend.end()
    frontend, worker = start(deployment, tmp_path / "cache")
    again, loaded_again = ask(frontend)

    assert loaded == {}
    assert again == said
    assert loaded_again["disk"] > 300
    metrics = worker.metrics()
    assert 'dynamo_kvbm_memory_utilization_percent{tier="disk"}' in metrics
    assert f"kvbm_matched_tokens {loaded_again['disk']}.0" in metrics


def test_killed_worker_leaves_shared_host_memory_to_its_successor(deployment, tmp_path):
    flags = (
        "--connector", "kvbm", "--kvbm-cpu-cache-gb", "100MB", "--kvbm-sharing-workers", "2",
        "--kvbm-shared-memory-dir", str(tmp_path / "memory"),
    )  # fmt: skip
    worker, frontend = deployment.native(*flags), deployment.frontend("--router-mode", "kv")
    frontend.others = [worker]
    frontend.await_models([MODEL])
    said, _ = ask(frontend)
    eventually(
        lambda: report(worker)["copied"]["offload_blocks_d2h"] > 20, what="blocks in host memory"
    )
    worker.signal(signal.SIGKILL)
    worker.popen.wait(PATIENT_S)
    frontend.end()
    worker, frontend = deployment.native(*flags), deployment.frontend("--router-mode", "kv")
    frontend.others = [worker]
    frontend.await_models([MODEL])
    again, loaded = ask(frontend)

    assert again == said
    assert loaded["host"] > 300


def test_trace_shows_when_a_tier_was_read_and_how_much(deployment, tmp_path):
    with collector.running() as found:
        deployment.environ |= {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": found.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        frontend, worker = start(
            deployment, tmp_path / "cache", "--num-gpu-blocks-override", "64", "--max-model-len", "1000"
        )  # fmt: skip
        ask(frontend)
        eventually(
            lambda: report(worker)["copied"]["offload_blocks_d2h"] > 20,
            what="blocks in host memory",
        )
        for animal in ("dog", "bird"):  # which the engine's memory has instead
            ask(frontend, PROMPT.replace("cat", animal))
        _, loaded = ask(frontend)
        span = found.await_names("read_tier")["read_tier"]
        (parent,) = [each for each in found.spans if each.span_id == span.parent_span_id]

    read = collector.attributes(span)
    assert (read["tier"], read["to"]) == ("host", "device")
    assert read["blocks"] * 16 == loaded["host"]
    assert read["bytes"] >= read["blocks"] * 16
    assert parent.name == "handle_payload"
    assert collector.attributes(parent)["cached_tokens.host"] == loaded["host"]
    assert parent.start_time_unix_nano <= span.start_time_unix_nano
    assert span.end_time_unix_nano <= parent.end_time_unix_nano


def test_clearing_blocks_empties_every_tier(deployment, tmp_path):
    frontend, worker = start(deployment, tmp_path / "cache")
    ask(frontend)
    eventually(
        lambda: report(worker)["copied"]["offload_blocks_h2d"] > 20,
        what="blocks on disk",
    )
    assert httpx.post(f"{frontend.url}/clear_kv_blocks", timeout=PATIENT_S).status_code == 200

    # a copy that was under way holds its block until it has ended
    eventually(
        lambda: not any(tier["used_blocks"] for tier in report(worker)["tiers"]), what="no block"
    )
    assert ask(frontend)[1] == {}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--kvbm-cpu-cache-gb", "100000"), "the largest that fits is"),
        (("--kvbm-storage-tiers", "hbm,nvme_ssd"), "nvme_ssd needs host_dram"),
        (("--kvbm-storage-tiers", "hbm,host_dram,nvme_ssd"), "expected --kvbm-nvme-path"),
        (("--kvbm-storage-tiers", "hbm,tape"), "got 'tape'"),
        (("--kvbm-storage-tiers", "host_dram"), "expected hbm first"),
        (("--kvbm-cpu-cache-gb", "lots"), "expected a size in GB"),
    ],
)
def test_impossible_tiers_are_refused_in_one_sentence(deployment, flags, expected):
    answer = subprocess.run(
        [sys.executable, "-m", "dynamo.native", "--connector", "kvbm", *flags],
        env=deployment.environ, capture_output=True, text=True, timeout=PATIENT_S,
    )  # fmt: skip

    assert answer.returncode == 2
    assert expected in answer.stderr
    assert len(answer.stderr.strip().splitlines()[-1:]) == 1
