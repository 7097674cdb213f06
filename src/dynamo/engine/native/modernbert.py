"""The encoder of ModernBERT (arXiv 2412.13663); weights in, hidden states out.

    x ── norm ── attention ──+── norm ── gated mlp ──+── … ── norm
    └────────────────────────┘ └─────────────────────┘

Positions are rotary. In most layers a token attends only to its neighbours, half of `local_attention` on either side,
with frequencies of their own; every third layer, as a rule, attends to the whole text. The first layer has no norm
before its attention, because the embedding has one.
"""

import torch
import torch.nn.functional as F

from dynamo.engine.native import attention, models, rope, weights
from dynamo.engine.native.classifier_files import ModernBertConfig

PREFIX = "model."


class Norm:
    """A layer norm, with or without a bias."""

    def __init__(self, config: ModernBertConfig, checkpoint: weights.Checkpoint, name: str) -> None:
        self._shape, self._eps = (config.hidden_size,), config.norm_eps
        self._weight = checkpoint.take(f"{name}.weight", config.hidden_size)
        self._bias = (
            checkpoint.take(f"{name}.bias", config.hidden_size) if config.norm_bias else None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class ModernBertLayer:
    """Attention and gated MLP, each after a norm and with a residual around both."""

    def __init__(
        self, config: ModernBertConfig, checkpoint: weights.Checkpoint, index: int
    ) -> None:
        prefix = f"{PREFIX}layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(name: str, rows: int, width: int, *, has_bias: bool) -> models.Linear:
            return models.make_linear(
                checkpoint, f"{prefix}.{name}", rows, width, has_bias=has_bias
            )

        self._attention_norm = (
            Norm(config, checkpoint, f"{prefix}.attn_norm") if index > 0 else None
        )
        self._qkv = linear("attn.Wqkv", 3 * hidden, hidden, has_bias=config.attention_bias)
        self._output = linear("attn.Wo", hidden, hidden, has_bias=config.attention_bias)
        self._mlp_norm = Norm(config, checkpoint, f"{prefix}.mlp_norm")
        self._up = linear("mlp.Wi", 2 * inner, hidden, has_bias=config.mlp_bias)
        self._down = linear("mlp.Wo", hidden, inner, has_bias=config.mlp_bias)
        self._heads = config.num_heads
        self.is_local = config.is_local(index)
        self._reach = config.local_attention // 2 if self.is_local else None

    def __call__(
        self,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        texts: attention.PackedTexts,
    ) -> torch.Tensor:
        """Map x [tokens, hidden] to the same shape, with the cosines and sines of its tokens."""
        normed = x if self._attention_norm is None else self._attention_norm(x)
        qkv = self._qkv(normed).unflatten(1, (3 * self._heads, -1))
        rotated = qkv[:, : 2 * self._heads]
        rope.rotate(rotated, *tables, out=rotated)
        attended = texts.attend_near(
            qkv[:, : self._heads], qkv[:, self._heads :], reach=self._reach
        )
        x = x + self._output(attended)
        inner, gate = self._up(self._mlp_norm(x)).chunk(2, -1)
        return x + self._down(F.gelu(inner) * gate)


class ModernBert:
    """The embedding and all layers."""

    def __init__(self, config: ModernBertConfig, checkpoint: weights.Checkpoint) -> None:
        """Take the tensors from the checkpoint. Raises ConfigError."""
        checkpoint.add_prefix(PREFIX)
        name, width = f"{PREFIX}embeddings", config.hidden_size
        self._words = checkpoint.take(f"{name}.tok_embeddings.weight", config.vocab_size, width)
        self._norm = Norm(config, checkpoint, f"{name}.norm")
        self._layers = [ModernBertLayer(config, checkpoint, i) for i in range(config.num_layers)]
        self._final_norm = Norm(config, checkpoint, f"{PREFIX}final_norm")
        checkpoint.refuse_rest("head.", "decoder.", "classifier.")
        device, dtype = str(self._words.device), self._words.dtype
        self._tables = {
            is_local: rope.Rope(
                head_dim=width // config.num_heads,
                theta=config.rope_theta(is_local=is_local),
                scaling="default",
                parameters={},
                original_context=config.num_positions,
            ).tables(config.num_positions, dtype=dtype, device=device)
            for is_local in (False, True)
        }

    def hidden(self, token_ids: torch.Tensor, texts: attention.PackedTexts) -> torch.Tensor:
        """Return the normed output of the last layer [tokens, hidden] for token ids [tokens]."""
        x = self._norm(F.embedding(token_ids, self._words))
        rows = {
            is_local: (cos[texts.positions], sin[texts.positions])
            for is_local, (cos, sin) in self._tables.items()
        }
        for layer in self._layers:
            x = layer(x, rows[layer.is_local], texts)
        return self._final_norm(x)
