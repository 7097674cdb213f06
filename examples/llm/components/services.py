"""Frontend, Processor, Router, workers and planner. What a class adds is only the spelling of flags."""

from dynamo.sdk import service
from dynamo.sdk.settings import render_flags

ROUTER_MODES = {"kv": "kv", "random": "random", "round-robin": "round-robin"}


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
        flags = ["--http-port", str(values["port"]), "--router-mode", ROUTER_MODES[mode]]
        flags += render_flags({k: v for k, v in config.section("Router").items() if k != "model"})
        hidden = ("port", "served-model-name", "endpoint")
        return flags + render_flags({k: v for k, v in values.items() if k not in hidden})


@service(dynamo={"namespace": "dynamo"}, module="dynamo.planner", environment="local")
class Planner:
    """Starts and stops workers by their load; `no-operation: true` only shows what it would do."""

    @classmethod
    def arguments(cls, config):
        values = dict(config.section("Planner"))
        advises = values.pop("no-operation", True)
        port = config.section("Frontend")["port"]
        flags = ["--frontend-url", f"http://127.0.0.1:{port}", *render_flags(values)]
        return [*flags, "--no-operation"] if advises else flags


def worker_flags(config, name):
    """Return the flags of a worker: its section's, and the name that clients use, from the frontend's section."""
    values = dict(config.section(name))
    flags = ["--model", str(values.pop("model"))] if "model" in values else []
    served_name = config.section("Frontend").get("served-model-name")
    flags += ["--model-name", served_name] if served_name else []
    if values.pop("remote-prefill", False):
        flags += ["--disaggregation-mode", "decode"]
    return flags + render_flags(values)
