"""How answers look in KServe's v2 protocol: tensors (`infer`), or plain fields (Triton's `generate`)."""

from collections.abc import Sequence
from typing import Any

from dynamo.base import errors
from dynamo.frontend import identity
from dynamo.frontend.answer import choices, sse, stream_delivery
from dynamo.protocols import kserve, openai_usage


class GenerateShape:
    """Plain fields; lists of them if several choices were asked for."""

    def __init__(self, asked: kserve.InferRequest, who: identity.Identity) -> None:
        self._head = {"model_name": who.model, "model_version": kserve.VERSION}
        if asked.infer_id:
            self._head["id"] = asked.infer_id

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
        return self.told([_text(piece)], [] if finish_reason is None else [finish_reason])

    def usage_chunk(self, usage: openai_usage.Usage) -> dict[str, Any]:
        """Raises LocalProtocolError: the protocol has no place for it, and its requests no way to ask."""
        raise errors.LocalProtocolError(f"KServe's protocol does not tell usage, got {usage}")

    def whole(
        self, answers: Sequence[sse.WholeChoice], usage: openai_usage.Usage
    ) -> dict[str, Any]:
        """The complete answer."""
        del usage
        texts = ["".join(map(_text, answer.pieces)) for answer in answers]
        return self.told(texts, [answer.finish_reason for answer in answers])

    def told(self, texts: list[str], reasons: list[str]) -> dict[str, Any]:
        """These texts, and why they ended, as far as they have."""
        found: dict[str, Any] = {**self._head, kserve.TEXT_OUTPUT: _alone(texts)}
        return {**found, kserve.FINISH_REASON: _alone(reasons)} if reasons else found


class InferShape(GenerateShape):
    """The same as tensors."""

    def told(self, texts: list[str], reasons: list[str]) -> dict[str, Any]:
        """These texts, and why they ended, as far as they have."""
        outputs = [_tensor(kserve.TEXT_OUTPUT, texts)]
        if reasons:
            outputs.append(_tensor(kserve.FINISH_REASON, reasons))
        return {**self._head, "outputs": outputs}


class PlainStream(stream_delivery.StreamDelivery):
    """A stream that just ends, without OpenAI's last word."""

    last_word = b""


def _alone(elements: list[str]) -> str | list[str]:
    return elements[0] if len(elements) == 1 else elements


def _tensor(name: str, elements: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(elements)], "data": elements}


def _text(piece: choices.Piece | None) -> str:
    """Completions are content, and nothing else."""
    return piece if isinstance(piece, str) else ""
