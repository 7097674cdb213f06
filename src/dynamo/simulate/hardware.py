"""How long an iteration takes on a group of GPUs that share a model: a roofline, and what tensor parallelism adds.

    overhead + max(weights read, arithmetic) + keys and values read + all-reduces

Weights are read once for whatever is computed, so decoding waits for memory and a prompt for arithmetic. Two
all-reduces a layer each cost their latency, and their bytes over the links: for a prompt on eight GPUs that is nearly
as much time as the arithmetic itself, which is why prompts are better computed by GPUs that each hold the whole model.

The default figures are of H100 SXM and a Llama of 70 billion parameters in FP8; how much of the peaks is reached are
assumptions, and `disagg` can be told others. Latencies are seconds, rates are per second.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One, as far as it can be used."""

    flops: float = 0.45 * 1979e12  # FP8, dense; the share that long prompts reach
    bytes_per_s: float = 0.75 * 3.35e12  # of its own memory
    memory_bytes: float = 0.95 * 80e9
    link_bytes_per_s: float = 300e9  # of an all-reduce over NVLink, as NCCL counts it
    all_reduce_s: float = 10e-6  # of one that has next to nothing to add
    overhead_s: float = 3e-3  # of an iteration: scheduling, launching, sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense transformer."""

    num_parameters: float = 70e9
    weight_bytes: float = 70e9
    num_layers: int = 80
    hidden_size: int = 8192
    kv_bytes: float = (
        327_680.0  # keys and values of a token: 80 layers of 8 heads of 128 in 16 bits
    )
    activation_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """GPUs that hold a model together."""

    gpu: Gpu
    model: Model
    size: int

    @property
    def num_kv_tokens(self) -> int:
        """What the memory beside the weights holds; 0 or less: the model does not fit."""
        free = self.size * self.gpu.memory_bytes - self.model.weight_bytes
        return int(free // self.model.kv_bytes)

    def prompt_s(self, start: int, end: int) -> float:
        """Arithmetic for the tokens from `start` to `end` of one prompt: linear, and attention to all before."""
        linear = 2 * self.model.num_parameters * (end - start)
        attention = 2 * self.model.num_layers * self.model.hidden_size * (end**2 - start**2)
        return (linear + attention) / (self.size * self.gpu.flops)

    def iteration_s(
        self, *, prompts_s: float, num_prompt_tokens: int, num_decoding: int, num_read: int
    ) -> float:
        """`prompts_s`: sum of `prompt_s`; `num_read`: tokens whose keys and values the decoding sequences read."""
        bandwidth = self.size * self.gpu.bytes_per_s
        decoding_s = 2 * self.model.num_parameters * num_decoding / (self.size * self.gpu.flops)
        return (
            self.gpu.overhead_s
            + max(self.model.weight_bytes / bandwidth, prompts_s + decoding_s)
            + num_read * self.model.kv_bytes / bandwidth
            + self._all_reduces_s(num_prompt_tokens + num_decoding)
        )

    def _all_reduces_s(self, num_tokens: int) -> float:
        if self.size == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden_size * self.model.activation_bytes
        over_links = 2 * (self.size - 1) / self.size * num_bytes / self.gpu.link_bytes_per_s
        return 2 * self.model.num_layers * (self.gpu.all_reduce_s + over_links)
