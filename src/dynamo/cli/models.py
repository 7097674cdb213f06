"""`dynamo list`, `dynamo pull`, `dynamo rm`: the models on this machine, in Hugging Face's cache."""

from dataclasses import dataclass

from dynamo.base import config, errors
from dynamo.worker import hub_models, model_source


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListConfig:
    """List the models on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConfig:
    """Download a model from the hub, or what is missing of it."""

    model: str = config.option(flag="", help="its name on the hub, such as Qwen/Qwen3-0.6B")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveConfig:
    """Remove a downloaded model from this machine."""

    model: str = config.option(flag="", help="its name, as `dynamo list` shows it")


def list_models(_: ModelListConfig) -> int:
    """Print a line for each model, the built-in one first."""
    print(f"{'MODEL':<48} {'SIZE':>10}")
    print(f"{model_source.BUILT_IN:<48} {'built in':>10}")
    for name, num_bytes in hub_models.cached_models().items():
        print(f"{name:<48} {num_bytes / 1e9:>7.2f} GB")
    return 0


def pull(options: PullConfig) -> int:
    """Download a model, with a bar for each file, and print its directory. Raises ConfigError."""
    print(model_source.resolve(options.model))
    return 0


def remove(options: RemoveConfig) -> int:
    """Remove a model. Raises ConfigError if it is not there, or built in."""
    if options.model == model_source.BUILT_IN:
        raise errors.ConfigError(
            f"{options.model} is built in: expected a model that was downloaded"
        )
    freed = hub_models.remove_cached(options.model)
    print(f"removed {options.model}: {freed / 1e9:.2f} GB are free again")
    return 0
