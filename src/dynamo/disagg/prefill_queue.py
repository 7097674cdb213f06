"""The prefill queue: prompts that wait for a prefill worker, and the request and output of a remote prefill.

Two implementations: `DirectQueue`, here, and `shared_queue.SharedQueue`, which all prefill workers share.
`tests/contract/test_prefill_queues.py` runs one suite over both.

`DirectQueue` needs no service: a prompt goes at once to the worker to which this process gave the fewest, and waits
there. The open stream acknowledges it: a worker that dies, or refuses because it is full, breaks the stream, and the
prompt goes to another. Nothing waits longer than its time limit.

Prefill workers that took a prompt and did not answer in time get no prompt until they have answered a probe. Their
process may be well and only their engine hang, so no connection breaks, and each prompt that they get waits for its
whole time limit. Or their host is silent, which costs each prompt the limit of silence. A probe is a prompt of one
token; it is repeated until it is answered, by whatever but silence, or the worker is gone.
"""

import asyncio
import collections
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.observability import logs
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.router import retry_rules
from dynamo.runtime import client

# by another worker, or by the decode worker itself
RETRIABLE = (errors.WorkerLost, errors.Unavailable, errors.EngineFailed)  # at another worker
PROBE_S = 10.0  # the time limit of a probe
PAUSE_S = 0.5  # between two probes
_logger = logging.getLogger(__name__)
SendProbe = Callable[[int, generate.Request], Coroutine[Any, Any, object]]


class PrefillQueue(Protocol):
    """Gets prompts computed by prefill workers, and says where their blocks are. Used on one event loop."""

    @property
    def size(self) -> int | None:
        """Prompts that wait at the least loaded worker; None if there is no prefill worker."""
        ...

    async def prefill(
        self, request: generate.Request, *, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """Get a prompt computed; return the parameters that say where its blocks are.

        Raises what the last worker failed with, NoWorkers, or DeadlineExceeded.
        """
        ...

    async def close(self) -> None:
        """End what runs in the background. Idempotent."""
        ...


class PrefillReceiver:
    """The `requests.Receiver` of a prefill's only output."""

    def __init__(self) -> None:
        self._has_ended = asyncio.Event()
        self._params: kv_transfer.KvTransferParams | None = None
        self._error: errors.DynamoError | None = None

    async def wait(self) -> kv_transfer.KvTransferParams:
        """Return the parameters that say where the blocks are. Raises what the prefill failed with, or Cancelled."""
        await self._has_ended.wait()
        if self._params is None:
            assert self._error is not None
            raise self._error
        return self._params

    def give_up(self) -> None:
        """End `wait` with Cancelled, because the caller went away."""
        self._end(None, errors.Cancelled("the caller went away"))

    def receive(self, output: generate.Output) -> None:
        """End `wait` with the output's transfer parameters, if it has some."""
        if output.kv_transfer_params is not None:
            self._end(output.kv_transfer_params, None)

    def replied(self, body: msgspec.Raw) -> None:
        """Fail, because an engine sends outputs."""
        del body
        self._end(None, errors.RemoteProtocolError("expected an engine's output, got a reply"))

    def ended(self, error: errors.DynamoError | None) -> None:
        """Fail, if the stream ends before there was an output with parameters."""
        silent = "the prefill worker does not say where its blocks are"
        self._end(None, error or errors.RemoteProtocolError(silent))

    def _end(
        self, params: kv_transfer.KvTransferParams | None, error: errors.DynamoError | None
    ) -> None:
        if not self._has_ended.is_set():
            self._params, self._error = params, error
            self._has_ended.set()


class PrefillDeaths:
    """The number of prefill workers that died while they had one prompt."""

    def __init__(self, request: generate.Request) -> None:
        self._request = request
        self._num_deaths = 0

    def record(self, error: errors.DynamoError) -> None:
        """Count the error of one worker. Raises SuspectRequest if the prompt may be what it died of."""
        self._num_deaths += isinstance(error, errors.WorkerDied)
        is_prepared = self._request.sampling_options.guided_decoding is None
        if retry_rules.is_suspect(self._num_deaths, is_prepared=is_prepared):
            raise retry_rules.make_error(self._request.id, self._num_deaths) from error


class DirectQueue:
    """A `PrefillQueue` that sends each prompt straight to a worker."""

    def __init__(
        self,
        workers: Callable[[], Sequence[int]],
        endpoint: client.EndpointClient,
        clock: clocks.Clock,
        on_retry: Callable[[], None] = lambda: None,
        *,
        own_id: int = 0,
    ) -> None:
        """`workers` returns the ids of connected prefill workers; `on_retry` is called for each retry.

        Of workers with equally few prompts it chooses the one with the id that follows `own_id`: the queues of several
        processes, which see none of each other's prompts, would else all choose the first of them.
        """
        self._workers = workers
        self._client = endpoint
        self._clock = clock
        self._on_retry = on_retry
        self._own_id = own_id
        self._hung = probed_workers(endpoint, clock)
        self._num_sent: collections.Counter[int] = collections.Counter()  # and not ended, by worker

    @property
    def size(self) -> int | None:
        """See `PrefillQueue`. A prompt that is being computed does not wait."""
        ids = self._usable(())
        return max(0, min(self._num_sent[i] for i in ids) - 1) if ids else None

    async def prefill(
        self, request: generate.Request, *, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """Send the prompt to the least loaded worker. See `PrefillQueue.prefill`."""
        tried: list[int] = []
        try:
            async with self._clock.timeout(timeout_s):
                return await self._send_until_computed(request, tried, timeout_s)
        except (TimeoutError, errors.DeadlineExceeded):
            if tried:
                self._hung.report(tried[-1], request)
            raise timeout_error(timeout_s) from None

    async def close(self) -> None:
        await self._hung.close()

    async def _send_until_computed(
        self, request: generate.Request, tried: list[int], timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """Send the prompt to one worker after the other, each of which is appended to `tried`."""
        deaths = PrefillDeaths(request)
        while True:
            ids = self._usable(tried)
            if not ids:
                raise errors.NoWorkers("there is no prefill worker to ask")
            fewest = min(self._num_sent[i] for i in ids)
            least_loaded = sorted(i for i in ids if self._num_sent[i] == fewest)
            tried.append(client.round_robin(least_loaded, self._own_id))
            try:
                return await self._send(tried[-1], request, timeout_s)
            except RETRIABLE as error:
                self._hung.report_loss(tried[-1], request, error)
                deaths.record(error)
                if not self._usable(tried):
                    raise
                self._on_retry()

    def _usable(self, tried: Sequence[int]) -> Sequence[int]:
        return self._client.usable(self._hung.without(self._workers()), tried)

    async def _send(
        self, instance_id: int, request: generate.Request, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        self._num_sent[instance_id] += 1
        try:
            return await request_prefill(
                self._client,
                instance_id,
                request,
                timeout_s=timeout_s,
                headers=logs.current_headers(),
            )
        finally:
            self._num_sent[instance_id] -= 1
            if not self._num_sent[instance_id]:
                del self._num_sent[instance_id]


def make_prefill_request(request: generate.Request) -> generate.Request:
    """Return the request for a prefill worker: the request itself, of one token.

    So the token that comes with the prompt is the one that its answer begins with, drawn with its own temperature,
    seed, penalties, grammar and limits, and the engine that answers can use it instead of computing it again. Each of
    several choices has to be drawn where it is answered: then the token is not used, and drawn in the cheapest way.
    """
    if request.sampling_options.n == 1:
        stops = request.stop_conditions
        return msgspec.structs.replace(
            request,
            stop_conditions=msgspec.structs.replace(
                stops, max_tokens=1, min_tokens=min(1, stops.min_tokens), stop=()
            ),
            annotations=(),
            data_parallel_rank=None,
            kv_transfer_params=kv_transfer.PREFILL_WITH_TOKEN,
        )
    return generate.Request(
        id=request.id,
        model=request.model,
        token_ids=request.token_ids,
        stop_conditions=generate.StopConditions(max_tokens=1, min_tokens=1),
        sampling_options=generate.SamplingOptions(temperature=0.0),
        priority=request.priority,
        lora_name=request.lora_name,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        kv_transfer_params=kv_transfer.PREFILL_ONLY,
    )


async def request_prefill(
    workers: client.EndpointClient,
    instance_id: int,
    request: generate.Request,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> kv_transfer.KvTransferParams:
    """Get a prompt computed by one worker; it stops if this task is cancelled. Raises what it failed with."""
    receiver = PrefillReceiver()
    stream = await workers.open(
        request,
        receiver,
        instance_id=instance_id,
        timeout_s=timeout_s,
        headers=headers,
        gives_up_early=True,  # the decode worker may have to compute the prompt then
    )
    try:
        return await receiver.wait()
    finally:
        stream.cancel()


class HungWorkers:
    """The hung workers of one pool. `send_probe` sends a request to an instance and returns when it has ended."""

    def __init__(
        self, send_probe: SendProbe, is_present: Callable[[int], bool], clock: clocks.Clock
    ) -> None:
        self._send_probe = send_probe
        self._is_present = is_present
        self._clock = clock
        self._hung: set[int] = set()
        self._tasks = tasks.Tasks()

    def without(self, instance_ids: Collection[int]) -> Collection[int]:
        """Return the instances that are not known to hang."""
        return [i for i in instance_ids if i not in self._hung] if self._hung else instance_ids

    def report(self, instance_id: int, request: generate.Request) -> None:
        """Record that a worker has not answered this request in time, and begin to probe it."""
        if instance_id not in self._hung:
            self._hung.add(instance_id)
            _logger.warning(
                "prefill worker %x was silent, or did not answer in time: it gets no prompts until it answers a probe",
                instance_id,
            )
            self._tasks.start("probe a hung prefill worker", self._probe(instance_id, request))

    def report_loss(
        self, instance_id: int, request: generate.Request, error: errors.DynamoError
    ) -> None:
        """Record that a worker was lost with this request, if it is silent: one that died is not probed."""
        if isinstance(error, errors.WorkerLost) and not isinstance(error, errors.WorkerDied):
            self.report(instance_id, request)

    async def close(self) -> None:
        """Stop probing. Idempotent."""
        await self._tasks.close()

    async def _probe(self, instance_id: int, late: generate.Request) -> None:
        probe = generate.Request(
            id=f"{late.id}-probe",
            model=late.model,
            token_ids=late.token_ids[: blocks.TOKEN_BYTES],
            stop_conditions=generate.StopConditions(max_tokens=1),
            sampling_options=generate.SamplingOptions(temperature=0.0),
        )
        while self._is_present(instance_id) and not await self._is_answered(instance_id, probe):
            await self._clock.sleep(PAUSE_S)
        self._hung.discard(instance_id)
        _logger.info("prefill worker %x answers again, or is gone", instance_id)

    async def _is_answered(self, instance_id: int, probe: generate.Request) -> bool:
        try:
            async with self._clock.timeout(PROBE_S):
                await self._send_probe(instance_id, probe)
        except (TimeoutError, errors.WorkerLost, errors.Unavailable, errors.DeadlineExceeded):
            return False
        except errors.DynamoError:  # it has no blocks to give away, or refuses: its engine works
            return True
        return True


def probed_workers(workers: client.EndpointClient, clock: clocks.Clock) -> HungWorkers:
    """Return the record of hung workers at this endpoint, without any."""

    async def send_probe(instance_id: int, probe: generate.Request) -> None:
        await request_prefill(workers, instance_id, probe, timeout_s=PROBE_S)

    return HungWorkers(send_probe, lambda instance_id: instance_id in workers.instances, clock)


def timeout_error(timeout_s: float) -> errors.DeadlineExceeded:
    """Return the error of a prompt that took too long."""
    return errors.DeadlineExceeded(
        f"no prefill worker has computed the prompt within {timeout_s:g} s"
    )
