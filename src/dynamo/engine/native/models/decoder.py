"""The decoder that Llama, Qwen2 and Qwen3 share: layers of attention and a gated MLP around one residual stream.

    x ── norm ── attention ──+── norm ── mlp ──+── … ── norm ── output layer
    └────────────────────────┘ └───────────────┘

The families differ in biases and in norms on queries and keys, which are just absent tensors here. A batch is flat:
x is [tokens, hidden], whatever sequences the tokens belong to; only attention tells them apart.

Projections of the same input are one matrix (queries, keys and values; gate and up), since on small batches
a step's cost is its number of calls.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from dynamo.engine.native import rope, weights
from dynamo.engine.native.config import ModelConfig
from dynamo.engine.native.models.linear import Linear


class AttentionBatch(Protocol):
    """The interface to attention over a flat batch: `attention.PagedBatch`, `attention.PackedTexts`."""

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Let q [tokens, heads, head_dim] attend to kv [tokens, 2 * KV heads, head_dim] and earlier tokens.

        Returns [tokens, heads * head_dim].
        """
        ...


class RmsNorm:
    """x / rms(x) * w over the last dimension, computed in 32 bits."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = torch.tensor(eps, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        mean_square = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1])
        return (x * mean_square.rsqrt_()).to(x.dtype).mul_(self._weight)


class Attention:
    """Project x to queries, keys and values; rotate and store them; attend; and project the result."""

    def __init__(self, config: ModelConfig, checkpoint: weights.Checkpoint, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        dim, has_bias = config.head_dim, config.has_qkv_bias
        rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self._layer, self._heads, self._num_qk = layer, heads, heads + kv_heads
        self._shape = -1, heads + 2 * kv_heads, dim
        self._qkv = _stacked(checkpoint, prefix, rows, hidden, has_bias=has_bias)
        self._norm: RmsNorm | None = None
        if config.has_qk_norm:
            q = checkpoint.take(f"{prefix}.q_norm.weight", dim).expand(heads, dim)
            k = checkpoint.take(f"{prefix}.k_norm.weight", dim).expand(kv_heads, dim)
            self._norm = RmsNorm(torch.cat((q, k)), config.norm_eps)
        self._output = _stacked(
            checkpoint, prefix, {"o_proj": hidden}, heads * dim, has_bias=config.has_output_bias
        )

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape."""
        qkv = self._qkv(x).view(self._shape)
        qk = qkv[:, : self._num_qk]
        rope.rotate(self._norm(qk) if self._norm else qk, cos, sin, out=qk)
        return self._output(batch.attend(self._layer, qkv[:, : self._heads], qkv[:, self._heads :]))


class Mlp:
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, checkpoint: weights.Checkpoint, layer: int) -> None:
        prefix, has_bias = f"model.layers.{layer}.mlp", config.has_mlp_bias
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = {"gate_proj": inner, "up_proj": inner}
        self._gate_up = _stacked(checkpoint, prefix, rows, hidden, has_bias=has_bias)
        self._down = _stacked(checkpoint, prefix, {"down_proj": hidden}, inner, has_bias=has_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up))


class DecoderLayer:
    """Attention and MLP, each with a norm before it and the residual stream around it."""

    def __init__(self, config: ModelConfig, checkpoint: weights.Checkpoint, index: int) -> None:
        def norm(name: str) -> RmsNorm:
            weight = checkpoint.take(f"model.layers.{index}.{name}.weight", config.hidden_size)
            return RmsNorm(weight, config.norm_eps)

        self._attention_norm = norm("input_layernorm")
        self._attention = Attention(config, checkpoint, index)
        self._mlp_norm = norm("post_attention_layernorm")
        self._mlp = Mlp(config, checkpoint, index)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape; keys and values go into the cache."""
        x = self._attention(self._attention_norm(x), cos, sin, batch).add_(x)
        return self._mlp(self._mlp_norm(x)).add_(x)


class Body:
    """All layers and the embedding: what is left of a decoder without its output layer."""

    def __init__(self, config: ModelConfig, checkpoint: weights.Checkpoint) -> None:
        """Take the tensors from the checkpoint. Raises ConfigError."""
        self._shape = config.vocab_size, config.hidden_size
        self._embedding = checkpoint.take("model.embed_tokens.weight", *self._shape)
        self._layers = [DecoderLayer(config, checkpoint, i) for i in range(config.num_layers)]
        weight = checkpoint.take("model.norm.weight", config.hidden_size)
        self.norm = RmsNorm(weight, config.norm_eps)

    def hidden(
        self, token_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Return the last layer's output [tokens, hidden]; cos and sin are the tables' rows for the tokens."""
        x = F.embedding(token_ids, self._embedding)
        for layer in self._layers:
            x = layer(x, cos, sin, batch)
        return x


class Decoder(Body):
    """A decoder with its output layer, which generates."""

    def __init__(self, config: ModelConfig, checkpoint: weights.Checkpoint) -> None:
        """Take all tensors of the checkpoint. Raises ConfigError."""
        super().__init__(config, checkpoint)
        if config.is_tied:
            self._output = Linear([self._embedding], [])
            checkpoint.refuse_rest("lm_head.weight")
        else:
            self._output = Linear([checkpoint.take("lm_head.weight", *self._shape)], [])
            checkpoint.refuse_rest()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] of hidden states [rows, hidden]."""
        return self._output(self.norm(hidden))


def _stacked(
    checkpoint: weights.Checkpoint, prefix: str, rows: dict[str, int], width: int, *, has_bias: bool
) -> Linear:
    """Stack projections of the same input to one, by their names and numbers of rows."""
    return Linear(
        [checkpoint.take(f"{prefix}.{name}.weight", num, width) for name, num in rows.items()],
        [checkpoint.take(f"{prefix}.{name}.bias", num) for name, num in rows.items() if has_bias],
    )
