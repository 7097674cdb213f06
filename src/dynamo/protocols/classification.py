"""The messages between the semantic router and the process of its encoders: texts in, labels or vectors out."""

import msgspec

COMPONENT, ENDPOINT = "semantic_encoder", "classify"


class ClassifierInput(msgspec.Struct, frozen=True, array_like=True):
    """A text for one of the classifiers: domain, attack or pii; or for the embedding."""

    classifier: str
    text: str


class ClassificationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of one request; those for the same classifier are computed together."""

    inputs: tuple[ClassifierInput, ...]


class LabeledSpan(msgspec.Struct, frozen=True, array_like=True):
    """Characters of a text with a label, without the prefix that says where in a span a token is."""

    label: str
    start: int
    end: int
    confidence: float


class TextLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one text."""

    labels: tuple[str, ...] = ()
    windows: tuple[tuple[float, ...], ...] = ()  # the probabilities of the labels in each window
    spans: tuple[LabeledSpan, ...] = ()  # of a token classifier, in the place of windows
    vector: bytes = b""  # of the embedding: little-endian 32-bit floats, of length 1 together
    is_complete: bool = True  # all of the text was read


class ClassificationReply(msgspec.Struct, frozen=True, kw_only=True):
    """The results in the order of the inputs."""

    results: tuple[TextLabels, ...]
