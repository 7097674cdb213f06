"""From our flags and vLLM's own to what vLLM is started with."""

from collections.abc import Mapping
from pathlib import Path

from dynamo.base import errors
from dynamo.engine.adapters.vllm import versions
from dynamo.engine.adapters.vllm.settings import VllmConfig

_OURS = ("--model", "--served-model-name", "--config")  # vLLM has flags of these names too
_CONNECTORS = {"nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}


def engine_args(directory: Path, settings: VllmConfig, model_name: str) -> versions.AsyncEngineArgs:
    """What vLLM is started with to serve the model in `directory`, and to call it so. Raises ConfigError."""
    given = {_flag(word) for word in settings.engine_args if word.startswith("-")}
    clash = given & {*_OURS, *(["--kv-transfer-config"] if settings.connector != "none" else [])}
    if clash:
        raise errors.ConfigError(_says_twice(clash.pop()))
    overrides = {"model": str(directory), "served_model_name": [model_name]}
    return versions.read_flags(settings.engine_args, overrides)


def lora_requests(settings: VllmConfig) -> Mapping[str, versions.LoRARequest]:
    """The adapters that can be asked for, by name. Raises ConfigError."""
    pairs = [module.partition("=") for module in settings.lora_modules]
    for name, _, path in pairs:
        if not name or not path:
            raise errors.ConfigError(
                f"--lora-modules: expected NAME=DIRECTORY, got {','.join(settings.lora_modules)!r}"
            )
    return {
        name: versions.LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
        for number, (name, _, path) in enumerate(pairs, start=1)
    }


def _flag(word: str) -> str:
    """A flag's name as vLLM reads it: with underscores, a value, or the key of a nested field, it is the same flag."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def _says_twice(flag: str) -> str:
    if flag == "--kv-transfer-config":
        return "--connector and --kv-transfer-config say the same: give one of them"
    return f"{flag} is ours, and vLLM is told: write it so, once, and with dashes"
