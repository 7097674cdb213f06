"""How answers look in KServe's v2 protocol: tensors (`infer`), or plain fields (Triton's `generate`)."""

from collections.abc import Sequence
from typing import Any

from dynamo.frontend import choices, sse, stream_delivery
from dynamo.preprocess import detokenize
from dynamo.protocols import kserve, openai_usage


class GenerateShape:
    """One text, or a list of them if several choices were asked for."""

    def __init__(
        self,
        request: kserve.InferRequest,
        request_id: str,
        created: int,
        model: str,
        decoder: detokenize.TextDecoder,
    ) -> None:
        del request_id, created, decoder
        self.head = {"model_name": model, "model_version": kserve.VERSION}
        if request.infer_id:
            self.head["id"] = request.infer_id

    def chunk(
        self,
        index: int,
        piece: choices.Piece | None,
        *,
        reports: Sequence[choices.TokenReport] | None = None,
        finish_reason: str | None = None,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """A piece of the one choice; the last one says why it ended."""
        del index, reports, is_first
        told: dict[str, Any] = {**self.head, kserve.TEXT_OUTPUT: _text(piece)}
        return told if finish_reason is None else {**told, kserve.FINISH_REASON: finish_reason}

    def usage_chunk(self, usage: openai_usage.Usage) -> dict[str, Any]:
        """Never asked for."""
        raise NotImplementedError(usage)

    def whole(
        self, answers: Sequence[sse.WholeChoice], usage: openai_usage.Usage
    ) -> dict[str, Any]:
        """The complete answer."""
        del usage
        texts, reasons = texts_and_reasons(answers)
        if len(answers) > 1:
            return {**self.head, kserve.TEXT_OUTPUT: texts, kserve.FINISH_REASON: reasons}
        return {**self.head, kserve.TEXT_OUTPUT: texts[0], kserve.FINISH_REASON: reasons[0]}


class InferShape(GenerateShape):
    """The same as tensors; it does not stream."""

    def whole(
        self, answers: Sequence[sse.WholeChoice], usage: openai_usage.Usage
    ) -> dict[str, Any]:
        """The complete answer."""
        del usage
        texts, reasons = texts_and_reasons(answers)
        outputs = [_tensor(kserve.TEXT_OUTPUT, texts), _tensor(kserve.FINISH_REASON, reasons)]
        return {**self.head, "outputs": outputs}


class PlainStream(stream_delivery.StreamDelivery):
    """A stream that just ends, without OpenAI's last word."""

    last_word = b""


def texts_and_reasons(answers: Sequence[sse.WholeChoice]) -> tuple[list[str], list[str]]:
    """Of each choice, what it says and why it ended."""
    texts = ["".join(map(_text, answer.pieces)) for answer in answers]
    return texts, [answer.finish_reason for answer in answers]


def _tensor(name: str, elements: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(elements)], "data": elements}


def _text(piece: choices.Piece | None) -> str:
    """Completions are content, and nothing else."""
    return piece if isinstance(piece, str) else ""
