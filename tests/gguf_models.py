"""Small random GGUF models for tests of the llama.cpp engine."""

import gguf
import numpy as np

END, BEGIN = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters():
    """The letters that byte-level BPE writes for the bytes 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_model(
    path,
    *,
    tokens=None,
    merges=("a b",),
    vocab_size=None,
    hidden=32,
    layers=1,
    heads=2,
    context=512,
    template=TEMPLATE,
    pre="qwen2",
    kv_heads=None,
    head_dim=None,
    feed_forward=None,
    quantization=None,
    part_tensors=0,
):
    """Write a qwen3 model of random weights with this byte-level vocabulary, by default bytes and ASCII words.

    With `part_tensors` it is in several files of so many tensors, as `…-00001-of-00003.gguf`.
    """
    kv_heads, feed_forward = kv_heads or heads, feed_forward or hidden
    head_dim = head_dim or hidden // heads
    tokens = list(tokens or [*byte_letters(), "ab"])
    if vocab_size is not None:
        tokens += [f"w{n}" for n in range(vocab_size - len(tokens) - 2)]
    tokens += [BEGIN, END]
    writer = gguf.GGUFWriter(path, "qwen3", split_max_tensors=part_tensors)
    for add_field, value in (
        (writer.add_context_length, context),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, layers),
        (writer.add_feed_forward_length, feed_forward),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, kv_heads),
        (writer.add_key_length, head_dim),
        (writer.add_value_length, head_dim),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 10000.0),
    ):
        add_field(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([normal] * (len(tokens) - 2) + [control] * 2)
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_add_bos_token(False)
    if template:
        writer.add_chat_template(template)
    rng = np.random.default_rng(0)

    def add(name, weights):
        if quantization is None:
            writer.add_tensor(name, weights)
        else:
            writer.add_tensor(
                name, gguf.quants.quantize(weights, quantization), raw_dtype=quantization
            )

    embeddings = rng.standard_normal((len(tokens), hidden), dtype=np.float32)
    embeddings[-2:] = 0  # it does not draw an end token by chance
    add("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for n in range(layers):
        for name, size in (
            ("attn_norm", hidden),
            ("ffn_norm", hidden),
            ("attn_q_norm", head_dim),
            ("attn_k_norm", head_dim),
        ):
            writer.add_tensor(f"blk.{n}.{name}.weight", np.ones(size, np.float32))
        for name, rows, columns in (
            ("attn_q", heads * head_dim, hidden),
            ("attn_k", kv_heads * head_dim, hidden),
            ("attn_v", kv_heads * head_dim, hidden),
            ("attn_output", hidden, heads * head_dim),
            ("ffn_gate", feed_forward, hidden),
            ("ffn_up", feed_forward, hidden),
            ("ffn_down", hidden, feed_forward),
        ):
            add(f"blk.{n}.{name}.weight", rng.standard_normal((rows, columns), dtype=np.float32))
    finish(writer)
    return path


def finish(writer):
    """Write what the writer has, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
