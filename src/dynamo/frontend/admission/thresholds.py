"""`GET|POST /busy_threshold`: from when on a worker counts as busy, for each model, at run time."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from dynamo.frontend.admission import busy
from dynamo.frontend.answer import sse
from dynamo.frontend.catalog import models
from dynamo.protocols import openai_decode
from dynamo.runtime.http import exchange

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)] | msgspec.UnsetType | None
_Tokens = Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType | None
_Batches = Annotated[float, msgspec.Meta(ge=0)] | msgspec.UnsetType | None


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller wants; what it leaves out stays, and null is no threshold."""

    model: str
    active_decode_blocks_threshold: _Share = msgspec.UNSET
    active_prefill_tokens_threshold: _Tokens = msgspec.UNSET
    active_prefill_tokens_threshold_frac: _Batches = msgspec.UNSET


_decode = openai_decode.RequestDecoder(Change).decode


class ThresholdBook:
    """The thresholds of each model: those of the start, until somebody changes them."""

    def __init__(self, known: models.Models, at_start: busy.Thresholds) -> None:
        self._models = known
        self._at_start = at_start
        self.on_change: Callable[[], None] = lambda: None
        self._by_model: dict[str, busy.Thresholds] = {}

    def of(self, model: str) -> busy.Thresholds:
        """From when on its workers are busy."""
        return self._by_model.get(model, self._at_start)

    def show(self, caller: exchange.Exchange) -> None:
        """`GET`: those of all models."""
        rows = [self._row(model.name) for model in self._models.ready]
        caller.respond(200, sse.encode({"thresholds": rows}))

    async def change(self, body: bytes) -> dict[str, Any]:
        """`POST`: some of one model; gives all that it has then. Raises RequestError."""
        wanted = _decode(body)
        name = self._models.find(wanted.model).name
        fields = {
            field: value
            for field in busy.Thresholds.__struct_fields__
            if (value := getattr(wanted, field)) is not msgspec.UNSET
        }
        self._by_model[name] = msgspec.structs.replace(self.of(name), **fields)
        self.on_change()
        return self._row(name)

    def _row(self, model: str) -> dict[str, Any]:
        return {"model": model, **msgspec.structs.asdict(self.of(model))}
