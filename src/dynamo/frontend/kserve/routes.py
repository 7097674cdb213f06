"""KServe's v2 protocol over HTTP, with Triton's generate and configuration extensions.

GET   /v2                                        what this server is
GET   /v2/health/live, /v2/health/ready
GET   /v2/models/{name}[/versions/1]             its tensors; …/ready, …/config
POST  /v2/models/{name}[/versions/1]/infer       tensors as JSON; …/generate, …/generate_stream without tensors
"""

import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from dynamo.base import errors
from dynamo.frontend import apis, pipeline
from dynamo.frontend.admission import controller
from dynamo.frontend.answer import delivery, sse
from dynamo.frontend.kserve import description, shapes
from dynamo.frontend.model_registry import registry
from dynamo.protocols import kserve, kserve_errors
from dynamo.runtime.http import exchange

PREFIX = "/v2"
_MODELS = "/v2/models/"
_PLACE = re.compile(
    r"(?P<model>.+?)(/versions/(?P<version>[^/]+))?"
    r"(/(?P<action>ready|config|infer|infer_stream|generate|generate_stream))?"
)
_ANSWERING = ("infer", "infer_stream", "generate", "generate_stream")
_BINARY = "inference-header-content-length"
InferApi = apis.Api[kserve.InferRequest, shapes.GenerateShape]
Accepts = Callable[[exchange.Exchange, delivery.Dialect], bool]


class Place(NamedTuple):
    """What a path below /v2/models/ speaks of."""

    model: str
    version: str
    action: str  # "" for the model itself


def place_of(path: str) -> Place:
    """A model's name may have slashes in it."""
    found = _PLACE.fullmatch(path.removeprefix(_MODELS))
    if found is None:
        return Place("", "", "")
    return Place(found["model"], found["version"] or "", found["action"] or "")


def _api_of(place: Place) -> InferApi:
    """A completion in other words."""
    has_tensors = place.action.startswith("infer")
    read = functools.partial(
        kserve.read_infer if has_tensors else kserve.read_generate,
        model=place.model,
        version=place.version,
        can_stream=place.action.endswith("_stream"),
    )
    return apis.Api(
        endpoint=apis.COMPLETIONS.endpoint,
        decode=read,
        prepare=apis.COMPLETIONS.prepare,
        shape=shapes.InferShape if has_tensors else shapes.GenerateShape,
        stream=shapes.PlainStream,
        dialect=kserve_errors,
    )


class KserveRoutes:
    """The handlers of all these routes."""

    def __init__(
        self,
        answers: pipeline.Pipeline,
        known: registry.ModelRegistry,
        counter: controller.AdmissionController,
        accepts: Accepts,
        *,
        is_draining: Callable[[], bool],
    ) -> None:
        self._is_draining = is_draining
        self._desk = counter
        self._pipeline = answers
        self._models = known
        self._accepts = accepts

    def table(self) -> dict[tuple[str, str], exchange.Handler]:
        """For the frontend's router."""
        return {
            ("GET", PREFIX): lambda caller: _tell(caller, description.of_server()),
            ("GET", "/v2/health/live"): lambda caller: _tell(caller, {"live": True}),
            ("GET", "/v2/health/ready"): self._ready,
            ("GET", _MODELS + "*"): self._describe,
            ("POST", _MODELS + "*"): self._answer,
        }

    def _ready(self, caller: exchange.Exchange) -> None:
        is_ready = bool(self._models.ready) and not self._is_draining()
        _tell(caller, {"ready": is_ready}, 200 if is_ready else 503)

    def _describe(self, caller: exchange.Exchange) -> None:
        place = place_of(caller.request.path)
        try:
            model = description.find(self._models, place.model, place.version)
            self._desk.check_may_see(caller, model.name)
        except errors.DynamoError as error:
            delivery.respond_error(caller, error, kserve_errors)
            return
        match place.action:
            case "":
                _tell(caller, description.of_model(model))
            case "config":
                _tell(caller, description.config_of(model))
            case "ready":
                ready = {"name": model.name, "ready": model.is_ready}
                _tell(caller, ready, 200 if model.is_ready else 503)
            case _:
                _refuse(caller, 405, f"{caller.request.path} takes POST, not GET")

    def _answer(self, caller: exchange.Exchange) -> Awaitable[None] | None:
        place = place_of(caller.request.path)
        if place.action not in _ANSWERING:
            _refuse(caller, 405, f"{caller.request.path} takes GET, not POST")
            return None
        if not self._accepts(caller, kserve_errors):
            return None
        if _BINARY in caller.request.headers:
            _refuse(caller, 400, "the binary tensor extension is not supported: send JSON tensors")
            return None
        return self._pipeline.answer(_api_of(place), caller)


def _tell(caller: exchange.Exchange, body: Any, status: int = 200) -> None:
    caller.respond(status, sse.encode(body))


def _refuse(caller: exchange.Exchange, status: int, message: str) -> None:
    caller.respond(status, kserve_errors.refusal(status, message))
