"""The texts of the training and development sets, as rows of dictionaries."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(directory: Path, name: str) -> list[Row]:
    """Return the rows of `NAME.jsonl.gz`."""
    with gzip.open(directory / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def is_held_out(cluster: object) -> bool:
    """Return whether a cluster of near duplicates is kept from fitting, to choose settings by: one in six."""
    return zlib.crc32(str(cluster).encode()) % 6 == 0


def read_topic_terms() -> list[Row]:
    """Return the terms of the categories, written for this project."""
    rows: list[Row] = []
    for line in Path(__file__).with_name("topic_terms.txt").read_text().splitlines():
        category, _, terms = line.partition(": ")
        if not line.startswith("#"):
            rows += [{"category": category, "text": term} for term in terms.split(", ")]
    return rows


def read_plain_questions() -> tuple[list[Row], list[Row]]:
    """Return plainly worded questions written for this project: those to train on, and those never trained on."""
    fitted: list[Row] = []
    kept_back: list[Row] = []
    for line in Path(__file__).with_name("plain_questions.txt").read_text().splitlines():
        category, _, questions = line.partition(": ")
        if line.startswith("#"):
            continue
        rows = [{"category": category, "text": text.strip()} for text in questions.split("|")]
        border = len(rows) * 2 // 3
        fitted += rows[:border]
        kept_back += rows[border:]
    return fitted, kept_back
