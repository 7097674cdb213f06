"""The commands of the four articles, word by word: parsed by the very options of the process that they start."""

import os
import pathlib
import runpy
import shlex
import subprocess
import sys

import pytest
import yaml

from dynamo.base import config, errors
from dynamo.disagg import config as disagg_config
from dynamo.frontend import config as frontend_config
from dynamo.planner import config as planner_config
from dynamo.router import config as router_config
from dynamo.worker import engines, settings
from waiting import PATIENT_S

ROOT = pathlib.Path(__file__).parents[2]
FRONTEND = (
    frontend_config.FrontendConfig,
    router_config.RoutingConfig,
    disagg_config.PrefillRoutingConfig,
)
KVBM = (
    "--connector kvbm --kvbm-storage-tiers hbm,host_dram,nvme_ssd --kvbm-offload-ratio 0.7"
    " --kvbm-nvme-path /fast-nvme/kv-cache"
)


def parse(line, environ=None):
    """Return all options of `python -m dynamo.NAME FLAGS`, by name, as that process would read them."""
    words = shlex.split(line)
    assert words[:2] == ["python", "-m"]
    name = words[2].removeprefix("dynamo.").removesuffix(".worker")
    if name == "frontend":
        parts = FRONTEND
    elif name.startswith("planner"):
        parts = (planner_config.PlannerConfig, planner_config.ScalingConfig)
    else:
        parts = (settings.WorkerConfig, engines.settings_of(name))
    loaded = config.load_parts(parts, prog=name, argv=words[3:], environ=environ or {})
    return {field: getattr(part, field) for part in loaded for field in part.__dataclass_fields__}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python -m dynamo.vllm --model Qwen/Qwen3-0.6B", {"model": "Qwen/Qwen3-0.6B"}),
        (
            "python -m dynamo.vllm --model Qwen/Qwen3-0.6B --is-prefill-worker",
            {"is_prefill_worker": True},
        ),
        ("python -m dynamo.frontend --http-port 8000", {"http_port": 8000}),
        ("python -m dynamo.vllm --worker-type prefill", {"disaggregation_mode": "prefill"}),
        ("python -m dynamo.vllm --worker-type decode", {"disaggregation_mode": "decode"}),
        ("python -m dynamo.frontend --router-mode kv", {"router_mode": "kv"}),
        (
            "python -m dynamo.frontend --router-mode kv --kv-overlap-score-weight 2.0"
            " --router-temperature 0.8 --kv-cache-block-size 64",
            {"kv_overlap_score_weight": 2.0, "router_temperature": 0.8, "kv_cache_block_size": 64},
        ),
        (
            "python -m dynamo.frontend --router-mode kv --kv-overlap-score-weight 0.5"
            " --router-temperature 1.2 --kv-cache-block-size 16",
            {"kv_overlap_score_weight": 0.5, "router_temperature": 1.2, "kv_cache_block_size": 16},
        ),
        ("python -m dynamo.frontend --router-mode kv --no-kv-events", {"kv_events": False}),
        (
            f"python -m dynamo.sglang.worker --model some {KVBM}",
            {
                "connector": "kvbm",
                "kvbm_storage_tiers": ("hbm", "host_dram", "nvme_ssd"),
                "kvbm_offload_ratio": 0.7,
                "kvbm_nvme_path": "/fast-nvme/kv-cache",
                "engine_args": (),
            },
        ),
        (
            f"python -m dynamo.native --model some {KVBM}",
            {"kvbm_offload_ratio": 0.7, "kvbm_nvme_path": "/fast-nvme/kv-cache"},
        ),
        ("python -m dynamo.planner", {"policy": "load"}),
        ("python -m dynamo.planner.planner_sla --policy sla", {"policy": "sla"}),
    ],
)
def test_command_means_what_the_article_says(line, expected):
    options = parse(line)

    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize("module", ["dynamo.sglang.worker", "dynamo.planner.planner_sla"])
def test_module_of_the_articles_is_a_command(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(module, run_name="__main__")

    assert exit_.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_comment_after_a_backslash_is_named():
    words = ["--router-mode", "kv", " "]  # what the shell makes of `kv \ # comment`

    with pytest.raises(errors.ConfigError, match="a comment or a blank after a backslash"):
        config.load_parts(FRONTEND, prog="x", argv=words, environ={})


def test_lines_of_dynamo_env_choose_etcd_and_nats():
    lines = (ROOT / "deploy" / "dynamo.env").read_text().split()
    environ = dict(line.split("=", 1) for line in lines)
    compose = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())["services"]
    options = parse("python -m dynamo.frontend", environ)

    assert (options["discovery_backend"], options["request_plane"]) == ("etcd", "nats")
    assert options["event_plane"] == "nats"
    for name, variable in (("etcd", "ETCD_ENDPOINTS"), ("nats", "NATS_SERVER")):
        port = environ[variable].rpartition(":")[2]
        assert any(entry.endswith(f":{port}:{port}") for entry in compose[name]["ports"])


def test_metrics_compose_file_names_what_lies_beside_it():
    folder = ROOT / "deploy" / "metrics"
    compose = yaml.safe_load((folder / "docker-compose.yml").read_text())
    mounted = [
        volume.partition(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
    ]

    assert all((folder / path).exists() for path in [*mounted, *compose["include"]])


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("build.sh --framework vllm", "docker build --file deploy/images/vllm.Dockerfile"),
        ("run.sh -it --framework vllm", "dynamo:latest-vllm bash"),
    ],
)
def test_container_script_prints_its_docker_command(script, expected):
    name, *flags = script.split()
    printed = subprocess.run(
        [ROOT / "container" / name, *flags, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )

    assert printed.returncode == 0, printed.stderr
    assert expected in printed.stdout


def test_container_has_the_caches_of_its_user(tmp_path):
    printed = subprocess.run(
        [ROOT / "container/run.sh", "--dry-run"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HF_HOME": "models", "HF_HUB_CACHE": "/hub"},
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )

    assert f"-v {tmp_path}/models:/models -v /hub:/models/hub" in printed.stdout
    assert f"--user {os.getuid()}:{os.getgid()}" in printed.stdout
