"""What a server and its models say of themselves in KServe's v2 protocol; the same over HTTP and gRPC."""

from typing import Any

from dynamo.base import distribution
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import kserve

EXTENSIONS = ["generate", "model_configuration"]
_STRING, _BOOL = "TYPE_STRING", "TYPE_BOOL"


def of_server() -> dict[str, Any]:
    """Its name and version."""
    version = distribution.version()
    return {"name": kserve.PLATFORM, "version": version, "extensions": EXTENSIONS}


def find(known: registry.ModelRegistry, name: str, version: str) -> RegisteredModel:
    """Raises ModelNotFound, NoWorkers, or InvalidRequest for one that does not make text."""
    model = known.find(name)
    kserve.check_version(name, version)
    model.check_can_generate()
    return model


def of_model(model: RegisteredModel) -> dict[str, Any]:
    """Its tensors."""
    return {
        "name": model.name,
        "versions": [kserve.VERSION],
        "platform": kserve.PLATFORM,
        "inputs": [_tensor(kserve.TEXT_INPUT, "BYTES", 1), _tensor(kserve.STREAMING, "BOOL", 1)],
        "outputs": [
            _tensor(kserve.TEXT_OUTPUT, "BYTES", -1),
            _tensor(kserve.FINISH_REASON, "BYTES", -1),
        ],
    }


def config_of(model: RegisteredModel) -> dict[str, Any]:
    """The same in Triton's words."""
    return {
        "name": model.name,
        "platform": kserve.PLATFORM,
        "backend": kserve.PLATFORM,
        "max_batch_size": 0,
        "input": [
            {"name": kserve.TEXT_INPUT, "data_type": _STRING, "dims": [1]},
            {"name": kserve.STREAMING, "data_type": _BOOL, "dims": [1], "optional": True},
        ],
        "output": [
            {"name": kserve.TEXT_OUTPUT, "data_type": _STRING, "dims": [-1]},
            {"name": kserve.FINISH_REASON, "data_type": _STRING, "dims": [-1]},
        ],
        "model_transaction_policy": {"decoupled": True},
    }


def _tensor(name: str, datatype: str, length: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [length]}
