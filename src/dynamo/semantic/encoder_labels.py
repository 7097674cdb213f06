"""The encoders of a configuration: the directory of each model that it names, and the names of the model's labels.

A `model_id` is a directory (absolute, beside the configuration, or below the process's own) or the name of a model
of the hub. A name is looked up in the local cache, by the encoders' process also on the hub; one that is not there is
noted, and the shipped classifier is used. Labels are read from the mapping that the configuration names, from the
mapping file that the original puts beside a model, or from config.json.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.semantic import config

DOMAIN, ATTACK, PII = "domain", "attack", "pii"
EMBEDDING = "embedding"  # not a classifier: it gives the vector of a text
HARMLESS = frozenset(
    {"benign", "safe", "normal", "legitimate", "clean", "unharmful", "not_jailbreak"}
)
EXACT = {DOMAIN: "exact_domain", ATTACK: "exact_attack", PII: "exact_names"}  # of the exact profile
EXACT_HEADS = {"exact_domain": "domain", "exact_attack": "attack", "exact_names": "names"}
_MAPPINGS = {
    DOMAIN: "category_mapping.json",
    ATTACK: "jailbreak_type_mapping.json",
    PII: "pii_type_mapping.json",
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"


FindHubModel = Callable[[str], Path | None]


def find_in_hub_cache(name: str) -> Path | None:
    """Return the directory of a model of the hub in the local cache; None if it is not there."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        directory = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None
    return directory if directory.is_dir() else None


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """A classifier of the configuration that an encoder computes."""

    directory: Path
    labels: tuple[str, ...]


def find_models(
    settings: config.SemanticConfig, directory: Path | None, find_hub_model: FindHubModel
) -> tuple[dict[str, EncoderModel], list[str]]:
    """Return the models by classifier, and notes on those that are not there. Raises ConfigError.

    `directory` is that of the configuration file.
    """
    category, pii, guard = (
        settings.classifier.category_model,
        settings.classifier.pii_model,
        settings.prompt_guard,
    )
    models: dict[str, EncoderModel] = {}
    notes = []
    for name, key, model_id, mapping in (
        (DOMAIN, "classifier.category_model", category.model_id, category.category_mapping_path),
        (PII, "classifier.pii_model", pii.model_id, pii.pii_mapping_path),
        (ATTACK, "prompt_guard", guard.model_id, guard.jailbreak_mapping_path),
    ):
        if not model_id:
            continue
        found = _find_directory(f"{key}.model_id", model_id, directory, find_hub_model)
        if found is None:
            notes.append(
                f"{key}.model_id: no directory {model_id}, and no such model in the hub's cache; "
                "the shipped classifier is used"
            )
            continue
        models[name] = EncoderModel(found, read_labels(found, _MAPPINGS[name], mapping, directory))
    if ATTACK in models:
        check_attack_labels(models[ATTACK])
    return models, notes


def find_embedder(
    settings: config.SemanticConfig, directory: Path | None, find_hub_model: FindHubModel
) -> tuple[Path | None, list[str]]:
    """Return the directory of the embedding model, and notes on those that are not there. Raises ConfigError.

    Nothing is looked for where nothing is compared by embedding, or a server gives the embeddings.
    """
    if not settings.compares_by_embedding or settings.encoders.embeddings_url:
        return None, []
    notes: list[str] = []
    others = settings.embedding_models
    for key, model_id in (
        ("bert_model.model_id", settings.bert_model.model_id),
        ("embedding_models.qwen3_model_path", others.qwen3_model_path),
        ("embedding_models.gemma_model_path", others.gemma_model_path),
    ):
        found = _find_directory(key, model_id, directory, find_hub_model) if model_id else None
        if found is not None:
            return found, notes
        if model_id:
            notes.append(f"{key}: no directory {model_id}, and no such model in the hub's cache")
    absent = "; ".join(notes) or "bert_model.model_id: expected the directory of an embedding model"
    return None, [f"{absent}; without it nothing is compared by embedding"]


def bare_label(label: str) -> str:
    """Return a label without the prefix of its place in a span (B-, I-, E-, S-); "" for no label."""
    if label == "O":
        return ""
    return label[2:] if label[:2] in ("B-", "I-", "E-", "S-", "O-") else label


def is_harmless(label: str) -> bool:
    """Return whether a label of the attack classifier stands for no attack."""
    return label.lower() in HARMLESS


def check_attack_labels(model: EncoderModel) -> None:
    """Raise ConfigError for labels that do not say which of them is an attack."""
    num_harmless = sum(map(is_harmless, model.labels))
    if not 0 < num_harmless < len(model.labels):
        raise errors.ConfigError(
            f"prompt_guard.model_id: {model.directory}: expected labels of attacks and one of "
            f"{', '.join(sorted(HARMLESS))}, got {', '.join(model.labels)}; "
            "name them by jailbreak_mapping_path"
        )


def read_labels(
    path: Path, mapping_name: str, mapping_path: str, directory: Path | None
) -> tuple[str, ...]:
    """Return the labels of a model in the order of their numbers. Raises ConfigError."""
    if mapping_path:
        for base in (Path(), *([directory] if directory else ()), path):
            if (base / mapping_path).is_file():
                return _read_mapping(base / mapping_path)
        if Path(mapping_path).is_absolute():
            raise errors.ConfigError(f"no such file: {mapping_path}; expected a mapping of labels")
    if (path / mapping_name).is_file():
        return _read_mapping(path / mapping_name)
    fields = _read_json(path / _CONFIG) if (path / _CONFIG).is_file() else {}
    if not isinstance(fields.get("id2label"), dict):
        raise errors.ConfigError(
            f"{path}: expected the names of the labels in {mapping_name} or as id2label in {_CONFIG}"
        )
    return _sort_labels(path / _CONFIG, fields["id2label"])


def _find_directory(
    key: str, model_id: str, directory: Path | None, find_hub_model: FindHubModel
) -> Path | None:
    path = config.find_file(key, model_id)
    candidates: list[Path] = [path] if directory is None else [path, directory / path]
    for candidate in candidates:
        if candidate.is_dir():
            if not any((candidate / name).is_file() for name in (_CONFIG, _ADAPTER)):
                raise errors.ConfigError(f"{key}: {candidate} has neither {_CONFIG} nor {_ADAPTER}")
            return candidate
    if path.is_absolute():
        raise errors.ConfigError(f"{key}: no such directory: {model_id}")
    return find_hub_model(model_id) if _HUB_NAME.fullmatch(model_id) else None


def _read_mapping(path: Path) -> tuple[str, ...]:
    """Return the labels of a mapping, which has names by number or numbers by name."""
    for table in _read_json(path).values():
        if not isinstance(table, dict) or not table:
            continue
        if all(isinstance(value, int) for value in table.values()):
            return _sort_labels(path, {str(number): name for name, number in table.items()})
        if all(isinstance(value, str) for value in table.values()):
            return _sort_labels(path, table)
    raise errors.ConfigError(f"{path}: expected a table of labels, as idx_to_label or label_to_idx")


def _sort_labels(path: Path, label_by_number: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        numbered = sorted((int(number), str(label)) for number, label in label_by_number.items())
    except ValueError as error:
        raise errors.ConfigError(f"{path}: expected numbers of labels: {error}") from error
    if [number for number, _ in numbered] != list(range(len(numbered))):
        raise errors.ConfigError(f"{path}: expected labels numbered from 0 on without a gap")
    return tuple(label for _, label in numbered)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"{path}: expected a JSON object: {error}") from error
