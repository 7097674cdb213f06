"""Answers in KServe's v2 protocol: tensors (`infer`), or plain fields (Triton's `generate`)."""

from collections.abc import Sequence
from typing import Any

from dynamo.base import errors
from dynamo.frontend.apis import completions
from dynamo.frontend.apis.kserve import request as kserve
from dynamo.frontend.delivery import identity, sse, streaming


class GenerateFormatter:
    """Formats an answer as plain fields; several choices are lists."""

    def __init__(self, request: kserve.InferRequest, answer_identity: identity.Identity) -> None:
        self._head = {"model_name": answer_identity.model, "model_version": kserve.VERSION}
        if request.infer_id:
            self._head["id"] = request.infer_id

    def chunk(self, part: sse.ChoicePart) -> dict[str, Any]:
        """Return the chunk for a part of the only choice; the last one has a finish reason."""
        reasons = [] if part.finish_reason is None else [part.finish_reason]
        return self._outputs([completions.content_of(part.piece)], reasons)

    def usage_chunk(self, usage: sse.Usage) -> dict[str, Any]:
        """Raise LocalProtocolError: the protocol has no usage, so no request can ask for it."""
        raise errors.LocalProtocolError(f"KServe's protocol does not tell usage, got {usage}")

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        """Return the complete answer."""
        del usage
        texts = ["".join(map(completions.content_of, answer.pieces)) for answer in answers]
        return self._outputs(texts, [answer.finish_reason for answer in answers])

    def _outputs(self, texts: list[str], reasons: list[str]) -> dict[str, Any]:
        outputs: dict[str, Any] = {**self._head, kserve.TEXT_OUTPUT: _unwrap(texts)}
        return {**outputs, kserve.FINISH_REASON: _unwrap(reasons)} if reasons else outputs


class InferFormatter(GenerateFormatter):
    """Formats an answer as tensors."""

    def _outputs(self, texts: list[str], reasons: list[str]) -> dict[str, Any]:
        tensors = [_tensor(kserve.TEXT_OUTPUT, texts)]
        if reasons:
            tensors.append(_tensor(kserve.FINISH_REASON, reasons))
        return {**self._head, "outputs": tensors}


class KserveStreamDelivery(streaming.StreamDelivery):
    """A stream that ends without OpenAI's `[DONE]`."""

    last_event = b""


def _unwrap(elements: list[str]) -> str | list[str]:
    """Return the only element, or the list of several."""
    return elements[0] if len(elements) == 1 else elements


def _tensor(name: str, elements: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(elements)], "data": elements}
