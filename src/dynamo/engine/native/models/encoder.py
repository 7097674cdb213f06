"""The encoder that BERT, RoBERTa and XLM-RoBERTa share (arXiv 1810.04805): every token looks at every other.

    x ── attention ──+── norm ── mlp ──+── norm ── …
    └────────────────┘ └───────────────┘

Unlike a decoder, it norms after each sum, takes positions from a table that is added to the tokens, and has biases
everywhere. A batch is flat, as for a decoder.
"""

import torch
import torch.nn.functional as F

from dynamo.engine.native import weights
from dynamo.engine.native.model_files import EncoderConfig
from dynamo.engine.native.models.decoder import AttentionBatch
from dynamo.engine.native.models.linear import Linear

_UNUSED = ("cls.", "lm_head.", "classifier.")  # heads for other tasks


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
        projections = {f"{prefix}.attention.self.{name}": hidden for name in _QKV}
        self._qkv = _linear(checkpoint, projections, hidden)
        self._output = _linear(checkpoint, {f"{prefix}.attention.output.dense": hidden}, hidden)
        self._attention_norm = LayerNorm(config, checkpoint, f"{prefix}.attention.output.LayerNorm")
        self._up = _linear(checkpoint, {f"{prefix}.intermediate.dense": inner}, hidden)
        self._down = _linear(checkpoint, {f"{prefix}.output.dense": hidden}, inner)
        self._mlp_norm = LayerNorm(config, checkpoint, f"{prefix}.output.LayerNorm")
        self._heads, self._layer = config.num_heads, index

    def __call__(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape."""
        qkv = self._qkv(x).unflatten(1, (3 * self._heads, -1))
        attended = batch.attend(self._layer, qkv[:, : self._heads], qkv[:, self._heads :])
        x = self._attention_norm(x + self._output(attended))
        return self._mlp_norm(x + self._down(F.gelu(self._up(x))))


class Encoder:
    """The embedding and all layers."""

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


_QKV = ("query", "key", "value")


def _linear(checkpoint: weights.Checkpoint, rows: dict[str, int], width: int) -> Linear:
    """Stack projections of the same input to one, by their names and numbers of rows."""
    return Linear(
        [checkpoint.take(f"{name}.weight", num, width) for name, num in rows.items()],
        [checkpoint.take(f"{name}.bias", num) for name, num in rows.items()],
    )
