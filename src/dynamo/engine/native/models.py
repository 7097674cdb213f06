"""The networks: matrix products, the decoder of Llama and Qwen, the encoder of BERT; weights in, hidden states out.

A batch is flat: x is [tokens, hidden], whatever sequences the tokens belong to; only attention tells them apart.
Projections of the same input are one matrix (queries, keys and values; gate and up), since on small batches
a step's cost is its number of calls.

The decoder that Llama, Qwen2 and Qwen3 share has layers of attention and a gated MLP around one residual stream; the
families differ in biases and in norms on queries and keys, which are just absent tensors here, and Qwen3-MoE has
several MLPs in a layer, of which each token takes a few:

    x ── norm ── attention ──+── norm ── mlp ──+── … ── norm ── output layer
    └────────────────────────┘ └───────────────┘

The encoder that BERT, RoBERTa and XLM-RoBERTa share (arXiv 1810.04805) norms after each sum, takes positions from a
table that is added to the tokens, and has biases everywhere; every token looks at every other.

On a CPU a small batch is bound by reading the weights. They are kept in the first of three layouts that is possible:

- **halves**: 16 bits for each weight, widened as they are read, with all arithmetic in 32 bits (FBGEMM, on x86).
  Only for weights that 16 bits hold, which is so wherever the checkpoint is in bfloat16 or float16;
- **packed**: oneDNN's own layout, which it reads two to three times as fast as the plain one;
- **plain**, as on all other devices.

torch has the operators of the first two for its quantizer and its compiler.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from dynamo.engine.native import attention, rope, weights
from dynamo.engine.native.config import ModelConfig
from dynamo.engine.native.model_files import EncoderConfig

_EXPECTED_ROWS = 32  # oneDNN's layout is best for about so many
_FBGEMM_ROWS = 120  # it multiplies so many rows of a batch at once
_HALF_ERROR = 2**-25  # of a bfloat16 that is too small to be exact in float16
_CHECKED_ROWS = 64  # at once: few enough for the processor's cache

_UNUSED = ("cls.", "lm_head.", "classifier.")  # heads of an encoder for other tasks

Product = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """y = x Wᵀ + b. The rows of several projections of the same x are stacked into one."""

    def __init__(self, matrices: list[torch.Tensor], biases: list[torch.Tensor]) -> None:
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        bias = torch.cat(biases) if biases else None
        if _can_halve(weight):
            self._product = _halved(weight, bias)
        elif _can_pack(weight):
            self._product = _packed(weight, bias)
        else:
            self._product = lambda x: F.linear(x, weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, in] to [rows, out]."""
        return self._product(x)


def _can_halve(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return all(
        bool(((rows.half().float() - rows).abs_().amax() <= _HALF_ERROR).item())
        for rows in weight.split(_CHECKED_ROWS)
    )


def _halved(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def product(x: torch.Tensor) -> torch.Tensor:
        missing = _missing_rows()[len(x) % _FBGEMM_ROWS]
        if not missing:
            return multiply(x, packed)
        return multiply(F.pad(x, (0, 0, 0, missing)), packed)[: len(x)]

    return product


@functools.cache
def _missing_rows() -> list[int]:
    """Return, for each number of rows, how many more FBGEMM needs to sum every row in the same order.

    It divides rows among kernels for 1 to 14 of them. On a processor with AVX2 those for 1 and 2 add in another order,
    and 32 rows are 5 times 6 and 2.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 256, generator=generator).half().float()
    x = torch.randn(_FBGEMM_ROWS, 256, generator=generator)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    usual = torch.cat([multiply(rows, packed) for rows in x.split(attention.MIN_ROWS)])
    alike = [n for n in range(len(x) + 1) if torch.equal(multiply(x[:n], packed), usual[:n])]
    return [next(n for n in [*alike, num] if n >= num) - num for num in range(_FBGEMM_ROWS)]


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _stacked(
    checkpoint: weights.Checkpoint, prefix: str, rows: dict[str, int], width: int, *, has_bias: bool
) -> Linear:
    """Stack projections of the same input to one, by their names and numbers of rows."""
    return Linear(
        [checkpoint.take_matrix(f"{prefix}.{name}", num, width) for name, num in rows.items()],
        [checkpoint.take(f"{prefix}.{name}.bias", num) for name, num in rows.items() if has_bias],
    )


def make_linear(
    checkpoint: weights.Checkpoint, name: str, num_rows: int, width: int, *, has_bias: bool
) -> Linear:
    """Take one projection from a checkpoint. Raises ConfigError."""
    biases = [checkpoint.take(f"{name}.bias", num_rows)] if has_bias else []
    return Linear([checkpoint.take_matrix(name, num_rows, width)], biases)


class AttentionBatch(Protocol):
    """The interface to attention over a flat batch: `attention.PagedBatch`, `attention.PackedTexts`."""

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Let q [tokens, heads, head_dim] attend to kv [tokens, 2 * KV heads, head_dim] and earlier tokens.

        Returns [tokens, heads * head_dim].
        """


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

    def __init__(
        self,
        checkpoint: weights.Checkpoint,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        has_bias: bool,
    ) -> None:
        rows = {"gate_proj": inner, "up_proj": inner}
        self._gate_up = _stacked(checkpoint, prefix, rows, hidden, has_bias=has_bias)
        self._down = _stacked(checkpoint, prefix, {"down_proj": hidden}, inner, has_bias=has_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up))


class SparseMlp:
    """A mixture of experts: the sum of the MLPs that a token's router likes best, by its weights.

    Each expert computes its tokens of the whole batch at once. Their number is filled up, as everywhere, so that an
    answer does not depend on the batch (`attention`).
    """

    def __init__(self, config: ModelConfig, checkpoint: weights.Checkpoint, prefix: str) -> None:
        assert config.experts is not None
        self._experts_config, hidden = config.experts, config.hidden_size
        self._router = Linear(
            [checkpoint.take_matrix(f"{prefix}.gate", config.experts.number, hidden)], []
        )
        inner = config.experts.intermediate_size
        self._experts = [
            Mlp(checkpoint, f"{prefix}.experts.{i}", hidden, inner, has_bias=False)
            for i in range(config.experts.number)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape."""
        shares, chosen = (
            self._router(x).softmax(-1, dtype=torch.float32).topk(self._experts_config.num_chosen)
        )
        if self._experts_config.is_normalized:
            shares /= shares.sum(-1, keepdim=True)
        shares = shares.to(x.dtype)
        output = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows, places = torch.where(chosen == i)
            padding = rows.new_zeros(attention.padded_rows(len(rows)) - len(rows))
            computed = self._experts[i](x[torch.cat((rows, padding))])[: len(rows)]
            output.index_add_(0, rows, computed * shares[rows, places].unsqueeze(1))
        return output


class DecoderLayer:
    """Attention and MLP, each with a norm before it and the residual stream around it."""

    def __init__(self, config: ModelConfig, checkpoint: weights.Checkpoint, index: int) -> None:
        def norm(name: str) -> RmsNorm:
            weight = checkpoint.take(f"model.layers.{index}.{name}.weight", config.hidden_size)
            return RmsNorm(weight, config.norm_eps)

        self._attention_norm = norm("input_layernorm")
        self._attention = Attention(config, checkpoint, index)
        self._mlp_norm = norm("post_attention_layernorm")
        prefix, inner = f"model.layers.{index}.mlp", config.intermediate_size
        self._mlp: Mlp | SparseMlp
        if config.experts is not None and index not in config.experts.dense_layers:
            self._mlp = SparseMlp(config, checkpoint, prefix)
        else:
            self._mlp = Mlp(
                checkpoint, prefix, config.hidden_size, inner, has_bias=config.has_mlp_bias
            )

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
        checkpoint.gptq_zero_offset = config.gptq_zero_offset
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
            checkpoint.drop_copy("lm_head.weight", self._embedding)
            self._output = Linear([self._embedding], [])
            checkpoint.refuse_rest("lm_head.weight")
        else:
            self._output = Linear([checkpoint.take_matrix("lm_head", *self._shape)], [])
            checkpoint.refuse_rest()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] of hidden states [rows, hidden]."""
        return self._output(self.norm(hidden))


class LayerNorm:
    """(x - mean) / deviation * w + b over the last dimension."""

    def __init__(self, config: EncoderConfig, checkpoint: weights.Checkpoint, name: str) -> None:
        self._shape, self._eps = (config.hidden_size,), config.norm_eps
        self._weight = checkpoint.take(f"{name}.weight", config.hidden_size)
        self._bias = checkpoint.take(f"{name}.bias", config.hidden_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class EncoderLayer:
    """Attention and MLP, each with a residual around it and a norm after the sum."""

    def __init__(self, config: EncoderConfig, checkpoint: weights.Checkpoint, index: int) -> None:
        prefix = f"{config.prefix}encoder.layer.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(name: str, rows: dict[str, int], width: int) -> Linear:
            return _stacked(checkpoint, f"{prefix}.{name}", rows, width, has_bias=True)

        qkv = dict.fromkeys(("query", "key", "value"), hidden)
        self._qkv = linear("attention.self", qkv, hidden)
        self._output = linear("attention.output", {"dense": hidden}, hidden)
        self._attention_norm = LayerNorm(config, checkpoint, f"{prefix}.attention.output.LayerNorm")
        self._up = linear("intermediate", {"dense": inner}, hidden)
        self._down = linear("output", {"dense": hidden}, inner)
        self._mlp_norm = LayerNorm(config, checkpoint, f"{prefix}.output.LayerNorm")
        self._heads, self._layer = config.num_heads, index

    def __call__(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape."""
        qkv = self._qkv(x).unflatten(1, (3 * self._heads, -1))
        attended = batch.attend(self._layer, qkv[:, : self._heads], qkv[:, self._heads :])
        x = self._attention_norm(x + self._output(attended))
        return self._mlp_norm(x + self._down(F.gelu(self._up(x))))


class Encoder:
    """A BERT-like encoder: the embeddings of words, positions and types, then all layers."""

    def __init__(self, config: EncoderConfig, checkpoint: weights.Checkpoint) -> None:
        """Take the tensors from the checkpoint, except those of heads for other tasks. Raises ConfigError."""
        checkpoint.add_prefix(config.prefix)
        tables = f"{config.prefix}embeddings"
        width = config.hidden_size
        self._words = checkpoint.take(f"{tables}.word_embeddings.weight", config.vocab_size, width)
        positions = checkpoint.take(
            f"{tables}.position_embeddings.weight", config.num_positions, width
        )
        types = checkpoint.take(f"{tables}.token_type_embeddings.weight", config.num_types, width)
        # a single text is of type 0 throughout
        self._positions = positions[config.first_position :] + types[0]
        self._norm = LayerNorm(config, checkpoint, f"{tables}.LayerNorm")
        self._layers = [EncoderLayer(config, checkpoint, i) for i in range(config.num_layers)]
        checkpoint.refuse_rest(f"{config.prefix}pooler.", *_UNUSED)

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Return the last layer's output [tokens, hidden] for token ids and positions within texts, both [tokens]."""
        x = F.embedding(token_ids, self._words) + F.embedding(positions, self._positions)
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x, batch)
        return x
