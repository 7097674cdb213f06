"""Frontend, Processor, Router, workers and planner. What a class adds is only the spelling of flags."""

import shlex

from dynamo.base import errors
from dynamo.sdk import service
from dynamo.sdk.settings import render_flags

ROUTER_MODES = ("kv", "random", "round-robin")


@service(dynamo={"namespace": "dynamo"}, resources={"gpu": 1}, module="dynamo.vllm")
class PrefillWorker:
    """Computes long prompts for the decode workers."""

    @classmethod
    def arguments(cls, config):
        return [*worker_flags(config, cls.__name__), "--is-prefill-worker"]


@service(dynamo={"namespace": "dynamo"}, resources={"gpu": 1}, module="dynamo.vllm")
class VllmWorker:
    """Answers; `remote-prefill` lets prefill workers compute its long prompts. `engine` names another command."""

    @classmethod
    def arguments(cls, config):
        return worker_flags(config, cls.__name__)


@service(dynamo={"namespace": "dynamo"}, inside="Frontend", router="round-robin")
class Processor:
    """Chat template and tokens, which pydynamo's frontend makes."""


@service(dynamo={"namespace": "dynamo"}, inside="Frontend")
class Router:
    """The choice of the worker by its cached prefixes, which pydynamo's frontend makes with `router: kv`."""


@service(dynamo={"namespace": "dynamo"}, module="dynamo.frontend", port=8000)
class Frontend:
    """The HTTP API, with Processor and Router inside."""

    @classmethod
    def arguments(cls, config):
        values = config.section("Frontend")
        mode = config.section("Processor").get("router", "round-robin")
        if mode not in ROUTER_MODES:
            raise errors.ConfigError(
                f"Processor.router: expected one of {', '.join(ROUTER_MODES)}, got {mode!r}"
            )
        flags = ["--http-port", str(values["port"]), "--router-mode", mode]
        flags += render_flags({k: v for k, v in config.section("Router").items() if k != "model"})
        hidden = ("port", "served-model-name", "endpoint")
        return flags + render_flags({k: v for k, v in values.items() if k not in hidden})


@service(dynamo={"namespace": "dynamo"}, module="dynamo.planner", environment="virtual")
class Planner:
    """Says how many workers the load needs; with `no-operation: false`, it also starts and stops them.

    `environment: local` starts VllmWorkers itself, of which the graph then starts none (`workers: 0`).
    """

    @classmethod
    def arguments(cls, config):
        values = dict(config.section("Planner"))
        if values["environment"] == "kubernetes":
            values.pop(
                "planner-port", None
            )  # the operator gives the pod this and the frontend's address
        else:
            values["frontend-url"] = f"http://127.0.0.1:{config.section('Frontend')['port']}"
        if values["environment"] == "local":
            values |= local_workers(config)
        flags = ["--no-operation"] if values.pop("no-operation", True) else []
        return [*render_flags(values), *flags]


def local_workers(config):
    """Return the planner's flags for workers of its own. Raises ConfigError if the graph starts some as well."""
    own = config.process_settings("VllmWorker")
    if own.get("workers", 1) != 0:
        raise errors.ConfigError(
            "Planner, environment: local starts all workers itself: expected VllmWorker.ServiceArgs.workers: 0, got"
            f" {own.get('workers', 1)}"
        )
    return {
        "backend": own.get("module", "dynamo.vllm").removeprefix("dynamo."),
        "model-name": config.section("Frontend").get("served-model-name"),
        "worker-flags": shlex.join(worker_flags(config, "VllmWorker")),
    }


def worker_flags(config, name):
    """Return the flags of a worker: its section's, and the name that clients use, from the frontend's section."""
    values = dict(config.section(name))
    flags = ["--model", str(values.pop("model"))] if "model" in values else []
    served_name = config.section("Frontend").get("served-model-name")
    flags += ["--model-name", served_name] if served_name else []
    if values.pop("remote-prefill", False):
        flags += ["--disaggregation-mode", "decode"]
    return flags + render_flags(values)
