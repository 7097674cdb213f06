"""What a KV router does for prefixes that move between workers: it names their sources, and has hot ones copied.

`replication` decides; this sends.
"""

import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import blocks, generate
from dynamo.router import api, metrics, replication, selection
from dynamo.runtime import client

_LIMIT_S = 30.0  # of one copy
StartTask = Callable[[str, Coroutine[Any, Any, None]], object]
_logger = logging.getLogger(__name__)


class PrefixCopies:
    """The prefix sources of one endpoint, and the copies ahead of need. Used on the event loop only."""

    def __init__(
        self,
        endpoint_client: client.EndpointClient,
        selector: selection.Selector,
        counts: metrics.RouteMetrics,
        clock: clocks.Clock,
        start_task: StartTask,
    ) -> None:
        """`start_task` runs copies ahead of need."""
        self.sources = replication.PrefixSources(endpoint_client.name.path)
        self._hot = replication.HotPrefixes()
        self._client, self._selector = endpoint_client, selector
        self._counts, self._clock, self._start_task = counts, clock, start_task

    def name_source(
        self, prompt: api.Prompt, request: generate.Request, worker: api.Worker
    ) -> generate.Request:
        """Return the request with the worker that has more of it than `worker`, to which it goes, if there is one."""
        if not self.sources or prompt.is_prefilled:
            return request
        cached = self._selector.count_cached(prompt)
        loads = self._selector.active.loads
        copy = self._hot.choose_copy(prompt, worker, cached, loads, self._clock.now())
        if copy is not None:
            body = self._make_copy_request(prompt, request, copy, cached)
            if body.prefix_source is not None:
                self._hot.num_copies += 1  # from now on: others of this turn count it
                self._start_task("copy a hot prefix", self._send_copy(body, copy))
        source = self.sources.find_source(prompt, worker, cached)
        if source is None:
            return request
        return msgspec.structs.replace(request, prefix_source=source)

    def _make_copy_request(
        self,
        prompt: api.Prompt,
        request: generate.Request,
        copy: replication.Replication,
        cached: Mapping[api.Worker, int],
    ) -> generate.Request:
        """Return a request of one token that begins with the prefix, for the worker that is to have it too."""
        num_tokens = copy.num_blocks * prompt.block_size + 1
        source = self.sources.find_source(prompt, copy.target, cached)
        return generate.Request(
            id=f"{request.id}-copy",
            model=request.model,
            token_ids=request.token_ids[: num_tokens * blocks.TOKEN_BYTES],
            stop_conditions=generate.StopConditions(max_tokens=1),
            lora_name=request.lora_name,
            cache_salt=request.cache_salt,
            data_parallel_rank=copy.target.dp_rank,
            prefix_source=source,
        )

    async def _send_copy(self, body: generate.Request, copy: replication.Replication) -> None:
        """Send the request that copies a prefix. Failures are logged."""
        _logger.info("copying a prefix ahead of need: %s", copy.reason)
        self._counts.count_prefix_copy()
        outputs = self._client.stream(
            body,
            item_type=generate.Output,
            instance_id=copy.target.instance_id,
            timeout_s=_LIMIT_S,
        )
        try:
            async with contextlib.aclosing(outputs):
                async for _ in outputs:
                    pass
        except errors.DynamoError as error:
            _logger.info("the prefix was not copied: %s", error)
        finally:
            self._hot.num_copies -= 1
