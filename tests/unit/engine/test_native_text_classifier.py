"""Classifiers by encoders, against transformers: sequences and tokens, with LoRA adapters in PEFT's layout."""

import json

import pytest
import safetensors.torch
import torch

import checkpoints
from dynamo.base import errors
from dynamo.engine.native import model_files
from dynamo.engine.native.settings import NativeConfig
from dynamo.engine.native.text_classifier import TextClassifier

pytestmark = pytest.mark.reference
LABELS = ("benign", "jailbreak", "injection")
WINDOWS = [
    [5, 6, 7, 8, 9],
    [11, 12],
    [400, 3, 200],
    [n % 500 + 3 for n in range(100)],
    [9, 8, 7, 6, 5],
]
TASKS = {"sequence": "SequenceClassification", "token": "TokenClassification"}


def expected(model, windows=WINDOWS):
    """Return transformers' probabilities of each window alone."""
    with torch.inference_mode():
        return [model(torch.tensor([window])).logits[0].softmax(-1) for window in windows]


def load(directory, num_labels=3):
    files = model_files.read_classifier(directory)
    return TextClassifier(files, num_labels, NativeConfig())


def assert_equal(classifier, model):
    found = classifier.classify(WINDOWS)
    for rows, reference in zip(found, expected(model), strict=True):
        torch.testing.assert_close(
            torch.tensor(rows), reference.reshape(-1, len(LABELS)), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_a_classifier_agrees_with_transformers_in_any_batch(tmp_path, family, task):
    directory = checkpoints.make_classifier(tmp_path, family, task, LABELS)

    assert_equal(load(directory), checkpoints.open_classifier(directory, task))


@pytest.mark.parametrize(
    "fields",
    [
        {"classifier_pooling": "mean", "norm_bias": True, "attention_bias": True, "mlp_bias": True},
        {"classifier_bias": True, "local_attention": 16},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
)
def test_settings_of_modernbert_are_followed(tmp_path, fields):
    directory = checkpoints.make_classifier(tmp_path, "modernbert", "sequence", LABELS, **fields)

    assert_equal(load(directory), checkpoints.open_classifier(directory, "sequence"))


def test_the_older_fields_of_modernbert_are_read(tmp_path):
    directory = checkpoints.make_classifier(tmp_path, "modernbert", "sequence", LABELS)
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    for name in ("layer_types", "rope_parameters"):
        del fields[name]
    fields |= {
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 5e4,
        "local_rope_theta": 2e3,
    }
    path.write_text(json.dumps(fields))

    assert_equal(load(directory), checkpoints.open_classifier(directory, "sequence"))


def write_adapter(directory, base, model, *, task_type, **overrides):
    """Write a random LoRA adapter with a head of its own, and apply it to a model of transformers."""
    torch.manual_seed(7)
    rank, scale = 4, 2.0
    tensors = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and last in ("query", "value", "Wqkv", "Wi"):
            first = torch.randn(rank, module.in_features) * 0.1
            second = torch.randn(module.out_features, rank) * 0.1
            tensors[f"base_model.model.{name}.lora_A.weight"] = first
            tensors[f"base_model.model.{name}.lora_B.weight"] = second
            module.weight.data += second @ first * scale
    for part in ("weight", "bias"):
        value = torch.randn_like(getattr(model.classifier, part)) * 0.3
        tensors[f"base_model.model.classifier.{part}"] = value
        getattr(model.classifier, part).data = value
    directory.mkdir()
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": task_type,
        "r": rank,
        "lora_alpha": rank * scale,
        "base_model_name_or_path": str(base),
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields | overrides))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_lora_adapter_and_its_head_agree_with_transformers(tmp_path, family, task):
    base = checkpoints.make_classifier(tmp_path / "base", family, task, LABELS)
    model = checkpoints.open_classifier(base, task)
    plain = expected(model)
    kind = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS"}[task]
    write_adapter(tmp_path / "adapter", base, model, task_type=kind)

    assert_equal(load(tmp_path / "adapter"), model)
    assert not torch.allclose(plain[0], expected(model)[0], atol=1e-2)


def test_an_adapter_for_a_base_without_a_head_brings_its_own(tmp_path):
    whole = checkpoints.make_classifier(tmp_path / "whole", "bert", "token", LABELS)
    model = checkpoints.open_classifier(whole, "token")
    model.bert.save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", model, task_type="TOKEN_CLS")

    assert_equal(load(tmp_path / "adapter"), model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"peft_type": "IA3"}, "peft_type IA3 is not supported"),
        ({"base_model_name_or_path": "nowhere"}, "expected the directory of the encoder"),
        ({"rank_pattern": {"query": 2}}, "rank_pattern is not supported"),
    ],
)
def test_an_adapter_that_is_no_plain_lora_is_refused(tmp_path, fields, message):
    base = checkpoints.make_classifier(tmp_path / "base", "bert", "sequence", LABELS)
    model = checkpoints.open_classifier(base, "sequence")
    write_adapter(tmp_path / "adapter", base, model, task_type="SEQ_CLS", **fields)

    with pytest.raises(errors.ConfigError, match=message):
        load(tmp_path / "adapter")


def test_an_adapter_for_modules_that_the_model_lacks_is_refused(tmp_path):
    base = checkpoints.make_classifier(tmp_path / "base", "bert", "sequence", LABELS)
    model = checkpoints.open_classifier(base, "sequence")
    write_adapter(tmp_path / "adapter", base, model, task_type="SEQ_CLS")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for part in "AB":
        name = f"base_model.model.bert.encoder.layer.0.attention.self.query.lora_{part}.weight"
        tensors[name.replace("layer.0", "layer.9")] = tensors.pop(name)
    safetensors.torch.save_file(tensors, path)

    with pytest.raises(errors.ConfigError, match="changes 1 modules that the model lacks"):
        load(tmp_path / "adapter")


def test_another_number_of_labels_is_refused(tmp_path):
    directory = checkpoints.make_classifier(tmp_path, "bert", "sequence", LABELS)

    with pytest.raises(errors.ConfigError, match=r"classifier\.bias is F32 \[3\]; expected"):
        load(directory, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not supported; expected seq"),
        ({"problem_type": "multi_label_classification"}, "expected one label for each text"),
    ],
)
def test_an_unsupported_classifier_is_refused(tmp_path, fields, message):
    directory = checkpoints.make_classifier(tmp_path, "bert", "sequence", LABELS)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    with pytest.raises(errors.ConfigError, match=message):
        load(directory)


def test_a_classifier_without_its_configuration_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="does not exist; expected sequence and token"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_activation": "relu"}, "the activation relu is not supported"),
        ({"num_attention_heads": 7}, "no even multiple of num_attention_heads"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "the RoPE scaling yarn is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types of 1 layers is not supported"),
    ],
)
def test_an_unsupported_modernbert_is_refused(tmp_path, fields, message):
    directory = checkpoints.make_classifier(tmp_path, "modernbert", "sequence", LABELS)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    with pytest.raises(errors.ConfigError, match=message):
        load(directory)
