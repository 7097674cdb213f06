"""The client of the encoders' process: one request for all texts that a routed request needs read."""

import functools
import logging
from collections.abc import Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import encoders, instances
from dynamo.runtime import client as endpoint_client
from dynamo.runtime import component
from dynamo.semantic import encoder_scores

DEFAULT_NAMESPACE = "dynamo"  # of a frontend that serves all
_logger = logging.getLogger(__name__)


class EncoderClient:
    """Asks the process that hosts the encoders, whichever instance of it there is."""

    def __init__(self, endpoint: endpoint_client.EndpointClient, clock: clocks.Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._has_waited = False  # for discovery to find the process, once

    async def classify(
        self, inputs: Sequence[encoders.ClassifierInput], timeout_s: float
    ) -> encoder_scores.Answers:
        """Return the answers; none if the process is away, fails, or takes longer than `timeout_s`."""
        if not inputs:
            return {}
        request = encoders.ClassificationRequest(inputs=tuple(inputs))
        try:
            async with self._clock.timeout(timeout_s):
                if not self._has_waited:
                    self._has_waited = True
                    await self._endpoint.wait_for_instances(timeout_s)
                reply = await self._call(request)
        except TimeoutError:
            _logger.warning("the encoders did not answer within %g s", timeout_s)
            return {}
        except errors.DynamoError as error:
            _logger.warning("the encoders did not answer: %s", error)
            return {}
        keys = [(one.classifier, one.text) for one in inputs]
        return dict(zip(keys, reply.results, strict=False))

    async def _call(self, request: encoders.ClassificationRequest) -> encoders.ClassificationReply:
        """Return the reply; if a process is lost before its reply, that of one other, for the texts may have been why.

        Raises as `EndpointClient.call`.
        """
        call = functools.partial(
            self._endpoint.call, request, reply_type=encoders.ClassificationReply
        )
        try:
            return await call()
        except errors.WorkerLost as error:
            other_ids = [
                each for each in self._endpoint.instances if not self._endpoint.is_down(each)
            ]
            if not other_ids:
                raise
            _logger.warning("another encoder process is asked, as one was lost: %s", error)
        return await call(among=other_ids)


def make_client(runtime: component.DistributedRuntime) -> EncoderClient:
    """Return a client of the encoders in the runtime's namespace; it is closed with the runtime."""
    namespace = runtime.namespace().name or DEFAULT_NAMESPACE
    name = instances.EndpointName(namespace, encoders.COMPONENT, encoders.ENDPOINT)
    return EncoderClient(runtime.client(name), runtime.clock)
