"""A checkpoint's tensors: safetensors files in a Hugging Face directory, read by name and shape.

This is the only module that reads weights, and safetensors is the only format: nothing here unpickles. A tensor that
the model needs and that is missing or has another shape is an error that names it, and so is a tensor that the model
does not take, since each would give wrong answers.

A checkpoint may have a LoRA adapter in PEFT's layout: each changed matrix is W + scale * B A when it is taken. Tensors
that the adapter holds whole (`modules_to_save`, as the classifier's) take the place of the checkpoint's. What the
adapter holds and the network does not take is an error, since the answers would be those of another model.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import safetensors
import torch

from dynamo.base import errors
from dynamo.engine.native import model_files, quantization

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
# in older checkpoints: values that follow from config.json
_DERIVED = re.compile(r".*(rotary_emb\.inv_freq|position_ids)")


class Checkpoint:
    """Open files with the tensors that were not taken yet; a context manager that closes the files."""

    def __init__(self, model_path: Path, *, dtype: torch.dtype, device: str) -> None:
        self._path, self._dtype, self._device = model_path, dtype, device
        self.gptq_zero_offset = 0  # set by a decoder, from its configuration
        self._files = contextlib.ExitStack()
        self._file_by_tensor: dict[str, Any] = {}
        self._prefix = ""  # that the names in the files lack

    def __enter__(self) -> "Checkpoint":
        with contextlib.ExitStack() as opened:
            for name in _file_names(self._path):
                file = opened.enter_context(_open(self._path / name))
                self._file_by_tensor.update(dict.fromkeys(file.keys(), file))
            self._files = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def add_prefix(self, prefix: str) -> None:
        """Add a prefix to all tensor names if no name has it: in checkpoints of models without their head none has."""
        if any(name.startswith(prefix) for name in self._file_by_tensor):
            return
        self._prefix = prefix
        self._file_by_tensor = {prefix + name: file for name, file in self._file_by_tensor.items()}

    def drop(self, name: str) -> None:
        """Leave a tensor out that another takes the place of; an unknown name is no error."""
        self._file_by_tensor.pop(name, None)

    def drop_copy(self, name: str, original: torch.Tensor) -> None:
        """Leave a tensor out that a tied model need not have. Raises ConfigError if it is no copy of the original."""
        if name in self._file_by_tensor and not torch.equal(
            self.take(name, *original.shape), original
        ):
            raise errors.ConfigError(
                f"{self._path}: {name} is not the embedding to which tie_word_embeddings in config.json ties it; "
                "set that to false to compute with the tensor, or remove the tensor"
            )

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor of this name, in the engine's type and on its device. Raises ConfigError."""
        file = self._file_by_tensor.pop(name, None)
        if file is None:
            raise errors.ConfigError(f"{self._path}: the tensor {name} is missing")
        stored_name = name.removeprefix(self._prefix)
        stored = file.get_slice(stored_name)
        if tuple(stored.get_shape()) != shape or stored.get_dtype() not in _FLOATS:
            raise errors.ConfigError(
                f"{self._path}: the tensor {name} is {stored.get_dtype()} {stored.get_shape()}; "
                f"expected one of {', '.join(_FLOATS)} and {list(shape)}"
            )
        return file.get_tensor(stored_name).to(self._device, self._dtype)

    def take_matrix(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        """Return the weight of a projection, expanded if it is stored quantized. Raises ConfigError."""
        parts = self._take_quantized(name)
        if not parts:
            return self.take(f"{name}.weight", num_rows, width)
        try:
            matrix = quantization.expand(
                parts, num_rows, width, gptq_zero_offset=self.gptq_zero_offset
            )
        except ValueError as error:
            raise errors.ConfigError(f"{self._path}: the quantized {name}: {error}") from error
        return matrix.to(self._device, self._dtype)

    def _take_quantized(self, name: str) -> dict[str, torch.Tensor]:
        """Take the tensors of a projection by their suffixes; none if it is stored as floats."""
        parts = {s for s in quantization.SUFFIXES if f"{name}.{s}" in self._file_by_tensor}
        if "weight_scale" in parts and "weight_packed" not in parts:
            parts.add("weight")
        return {
            suffix: self._file_by_tensor.pop(f"{name}.{suffix}").get_tensor(
                f"{name}.{suffix}".removeprefix(self._prefix)
            )
            for suffix in parts
            if f"{name}.{suffix}" in self._file_by_tensor
        }

    def _is_zero_bias(self, name: str) -> bool:
        """Tell whether a tensor is a bias without effect, as GPTQ's writers add to every projection."""
        if not name.endswith(".bias"):
            return False
        return not self._file_by_tensor[name].get_tensor(name.removeprefix(self._prefix)).any()

    def refuse_rest(self, *ignored: str) -> None:
        """Raise ConfigError if a tensor was not taken, except derived ones and those with a prefix in `ignored`."""
        unknown = [
            name
            for name in self._file_by_tensor
            if not name.startswith(ignored)
            and not _DERIVED.fullmatch(name)
            and not self._is_zero_bias(name)
        ]
        if unknown:
            raise errors.ConfigError(
                f"{self._path}: {len(unknown)} tensors are of no known use, as {sorted(unknown)[0]}; "
                "config.json does not describe these weights"
            )


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a small safetensors file. Raises ConfigError."""
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)


def _file_names(path: Path) -> list[str]:
    if (path / _SINGLE).exists():
        return [_SINGLE]
    if not (path / _INDEX).exists():
        raise errors.ConfigError(f"{path} holds neither {_SINGLE} nor {_INDEX}")
    try:
        names = sorted(set(json.loads((path / _INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.ConfigError(
            f"{path / _INDEX} is not an index of safetensors: {error!r}"
        ) from error
    for name in names:
        if Path(name).name != name:
            raise errors.ConfigError(
                f"{path / _INDEX} names the file {name}, outside the directory"
            )
    return names


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise errors.ConfigError(f"{path} cannot be read as safetensors: {error}") from error


FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.*)\.lora_(A|B)(?:\.default)?\.weight")
_SAVED = re.compile(r"\.(?:modules_to_save|original_module)(?:\.default)?\.")


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with tensors that an adapter changes."""

    def __init__(
        self,
        model_path: Path,
        adapter_path: Path,
        adapter: model_files.AdapterConfig,
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
        for name, tensor in read_tensors(adapter_path / FILE).items():
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
