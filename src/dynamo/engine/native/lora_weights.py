"""A checkpoint with a LoRA adapter in PEFT's layout: each changed matrix is W + scale * B A when it is taken.

Tensors that the adapter holds whole (`modules_to_save`, as the classifier's) take the place of the checkpoint's. What
the adapter holds and the network does not take is an error, since the answers would be those of another model.
"""

import re
from pathlib import Path

import torch

from dynamo.base import errors
from dynamo.engine.native import classifier_files, weights

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.*)\.lora_(A|B)(?:\.default)?\.weight")
_SAVED = re.compile(r"\.(?:modules_to_save|original_module)(?:\.default)?\.")


class AdaptedCheckpoint(weights.Checkpoint):
    """A checkpoint with tensors that an adapter changes."""

    def __init__(
        self,
        model_path: Path,
        adapter_path: Path,
        adapter: classifier_files.AdapterConfig,
        *,
        prefix: str,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """`prefix` is that of the encoder's tensors, which an adapter for the encoder alone lacks."""
        super().__init__(model_path, dtype=dtype, device=device)
        self._adapter_path, self._scale = adapter_path, adapter.scale
        self._dtype, self._device = dtype, device
        self._encoder_prefix = prefix
        self._factors: dict[str, dict[str, torch.Tensor]] = {}  # by module, then A or B
        self._saved: dict[str, torch.Tensor] = {}
        for name, tensor in weights.read_tensors(adapter_path / FILE).items():
            short = name.removeprefix(_PREFIX)
            if match := _LORA.fullmatch(short):
                self._factors.setdefault(match[1], {})[match[2]] = tensor.float()
            elif ".original_module." not in short:
                self._saved[_SAVED.sub(".", short)] = tensor

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor of this name with the adapter's change. Raises ConfigError."""
        saved = self._saved.pop(name, None)
        if saved is not None:
            self.drop(name)
            self._check_shape(name, saved, shape)
            return saved.to(self._device, self._dtype)
        tensor = super().take(name, *shape)
        factors = self._take_factors(name.removesuffix(".weight"))
        if factors is None:
            return tensor
        if set(factors) != {"A", "B"} or factors["A"].shape[0] != factors["B"].shape[-1]:
            raise errors.ConfigError(
                f"{self._adapter_path}: {name}: expected lora_A and lora_B of one rank"
            )
        change = factors["B"] @ factors["A"] * self._scale
        self._check_shape(name, change, shape)
        return (tensor.float() + change.to(self._device)).to(self._dtype)

    def refuse_rest(self, *ignored: str) -> None:
        """Raise ConfigError if a tensor of the checkpoint or of the adapter was not taken."""
        super().refuse_rest(*ignored)
        unused = [*self._factors, *self._saved]
        if unused:
            raise errors.ConfigError(
                f"{self._adapter_path}: the adapter changes {len(unused)} modules that the model lacks, as {unused[0]}"
            )

    def _take_factors(self, module: str) -> dict[str, torch.Tensor] | None:
        for name in (module, module.removeprefix(self._encoder_prefix)):
            if name in self._factors:
                return self._factors.pop(name)
        return None

    def _check_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise errors.ConfigError(
                f"{self._adapter_path}: the change of {name} is {list(tensor.shape)}; expected {list(shape)}"
            )
