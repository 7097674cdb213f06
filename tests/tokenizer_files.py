"""Tokenizers that tests write."""

from collections.abc import Sequence

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


def wordpiece(words: Sequence[str]) -> str:
    """Return the tokenizer.json of a WordPiece tokenizer as BERT has it, with this vocabulary."""
    vocabulary = {word: number for number, word in enumerate((*_SPECIAL, *words))}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return made.to_str()
