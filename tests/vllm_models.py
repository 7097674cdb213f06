"""The models that vLLM serves in the tests: small, with random weights and the built-in model's tokenizer.

Most tests have a Qwen3; the others are of families whose layers do not all keep every KV block. Embeddings are untied
and weights wide, so that greedy answers wander: where one token repeats, equality of answers proves nothing.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers

from checkpoints import make_checkpoint
from dynamo.worker import model_source


def make(directory: Path, *, context_length: int = 2048) -> Path:
    """Write it to the directory."""
    make_checkpoint(
        directory,
        "qwen3",
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        max_position_embeddings=context_length,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_source.built_in() / name, directory / name)
    return directory


_SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def make_of_family(directory: Path, family: str) -> Path:
    """Write a model of gemma3, gpt_oss (sliding windows) or qwen3_next (linear attention) to the directory."""
    match family:
        case "gemma3":
            config = transformers.Gemma3TextConfig(**_SHAPE, **_SLIDING, query_pre_attn_scalar=32)
        case "gpt_oss":
            config = transformers.GptOssConfig(
                **_SHAPE, **_SLIDING, num_local_experts=4, num_experts_per_tok=2
            )
        case _:
            layers = ["linear_attention", "full_attention"] * 2
            config = transformers.Qwen3NextConfig(
                **_SHAPE, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=64,
                layer_types=layers, linear_num_key_heads=2, linear_num_value_heads=4,
            )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_source.built_in() / name, directory / name)
    return directory


IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_SEEING_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{%- endfor %}{%- endif %}{{ '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def make_seeing(directory: Path) -> Path:
    """Write an Idefics3 of random weights, whose processor needs no torchvision; an image is 4 tokens and 3 around."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model_source.built_in() / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(IMAGE_TOKENS),
        chat_template=_SEEING_TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[0]),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config).float()
    with torch.no_grad():  # else greedy answers repeat one token, whatever is seen
        for weights in model.parameters():
            weights.mul_(4.0 if weights.dim() > 1 else 1.0)
    model.save_pretrained(directory)
    processing = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_image_splitting": False,
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 32},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processing))
    (directory / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 4})
    )
    return directory
