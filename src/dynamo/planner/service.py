"""The planner as a service: in each interval observe, decide, order, and tell.

A decision is one line of the log, a change of the metrics, an entry of `GET /planner/decisions`, and one of the report
for consoles (`protocols.planner_report`). Of several in one namespace the oldest acts, of those that may; the others
decide as well and say that they stand by. One that takes over changes nothing in its first interval, and takes nothing
away before it has observed a whole window; the latter holds for one that stood still as well. A failure of a source or
of the connector costs one decision, and is told as its reason.
"""

import asyncio
import copy
import dataclasses
import functools
import logging
from collections import deque
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.observability import metrics as observed
from dynamo.planner import profile_files, scaling_pipeline
from dynamo.planner.auto_policy import AutoPolicy
from dynamo.planner.config import ScalingConfig
from dynamo.planner.connectors import Connector, WakeUpPromise
from dynamo.planner.forecast import RequestShape
from dynamo.planner.metrics import PlannerMetrics
from dynamo.planner.observation import Fresh, Observation, PoolLoad, Stale
from dynamo.planner.policies import LoadPolicy, Mode, Policy, SlaPolicy, Targets
from dynamo.planner.predictive_policy import Headroom, PredictivePolicy, Sizing
from dynamo.planner.predictors import make_predictor
from dynamo.planner.regression_policy import RegressionPolicy
from dynamo.planner.scaling_pipeline import Decision, Limits, ScalingPipeline
from dynamo.planner.traffic_source import (
    STALE_INTERVALS,
    FrontendLoad,
    LoadSource,
    TrafficSource,
)
from dynamo.protocols import planner_report
from dynamo.runtime import discovery, requests
from dynamo.runtime.http import exchange, server

_NUM_DECISIONS = 1000  # that /planner/decisions shows
_STOOD_STILL_S = 10.0  # between two decisions, if their interval is short
_logger = logging.getLogger(__name__)


def make_policy(settings: ScalingConfig) -> Policy:
    """Make the policy. Raises ConfigError if it needs a profile that cannot be read."""
    targets = settings.targets
    if settings.mode == "auto" and settings.policy != "predictive":
        raise errors.ConfigError(
            f"--mode auto: expected --policy predictive and a profile, got --policy {settings.policy}"
        )
    if settings.policy == "load":
        return LoadPolicy(targets, settings.thresholds)
    if settings.policy == "regression":
        return RegressionPolicy(targets, settings.regression)
    profile = profile_files.read_profile(Path(settings.profile_results_dir))
    predictor = functools.partial(
        make_predictor, settings.load_predictor, settings.load_prediction_window_size
    )
    if settings.policy == "sla":
        return SlaPolicy(profile, targets, predictor, corrects=settings.correction)
    headroom = Headroom(startup_s=settings.startup_time)

    def make_predictive(targets: Targets) -> PredictivePolicy:
        return PredictivePolicy(profile, targets, predictor, headroom, corrects=settings.correction)

    if settings.mode == "auto":
        return AutoPolicy(targets, make_predictive, settle_s=settings.settle_s)
    return make_predictive(targets)


def unreachable_target(settings: ScalingConfig) -> str:
    """Return which target the profile cannot meet for the expected request, or nothing. Raises ConfigError."""
    if settings.policy in ("load", "regression"):
        return ""
    profile = profile_files.read_profile(Path(settings.profile_results_dir))
    shape = RequestShape(
        isl=settings.isl, osl=settings.osl, context=settings.isl + settings.osl / 2
    )
    modes: tuple[Mode, ...] = ("agg", "disagg") if settings.mode == "auto" else (settings.mode,)
    targets = (dataclasses.replace(settings.targets, mode=mode) for mode in modes)
    reasons = [Sizing(profile, t, Headroom(), shape, burstiness=1.0).unreachable for t in targets]
    return reasons[0] if all(reasons) else ""


def make_pipeline(settings: ScalingConfig) -> ScalingPipeline:
    """Make the decider of a planner. Raises ConfigError."""
    settings.check()
    limits = Limits(
        max_gpus=settings.max_gpu_budget,
        min_workers=settings.min_endpoint,
        max_workers=settings.max_workers,
        stabilization_s=settings.stabilization_s,
        startup_s=settings.startup_time,
        is_advisory=not settings.operation,
    )
    return ScalingPipeline(make_policy(settings), settings.targets, limits)


def add_queued(load: PoolLoad, held: FrontendLoad) -> PoolLoad:
    """Return the load of the pool that computes prompts, with those that KV routers hold back for it."""
    return dataclasses.replace(
        load,
        num_waiting=load.num_waiting + held.num_queued,
        waiting_tokens=load.waiting_tokens + held.queued_tokens,
    )


class Leadership:
    """The election of the planner that acts: the oldest one with a living lease."""

    def __init__(
        self, registry: discovery.Discovery, namespace: str, instance_id: int, clock: clocks.Clock
    ) -> None:
        self._registry = registry
        self.namespace = namespace
        self._prefix = f"v1/planners/{namespace}/"
        self._key = f"{self._prefix}{int(1e9 * clock.wall()):020d}-{instance_id:x}"
        self._has_joined = False

    async def join(self) -> None:
        """Stand for election with the time of this call as age."""
        await self._registry.put(self._key, b"{}")
        self._has_joined = True

    async def is_leader(self) -> bool:
        """Return True if no older planner lives; of one that has not joined, if none lives that has."""
        default_key = "" if self._has_joined else self._key
        return min(await self._registry.get_prefix(self._prefix), default=default_key) == self._key

    async def leave(self) -> None:
        """Stand down, so that the next oldest planner acts."""
        await self._registry.delete(self._key)


class PlannerService:
    """Owns the loop and the HTTP port; the connector and the sources belong to the caller."""

    def __init__(
        self,
        settings: ScalingConfig,
        source: TrafficSource,
        connector: Connector,
        leadership: Leadership,
        clock: clocks.Clock,
        *,
        loads: tuple[LoadSource, LoadSource],
        wake_up: WakeUpPromise | None = None,
        log_file: Path | None = None,
    ) -> None:
        self._settings = settings
        self._pipeline = make_pipeline(settings)
        # copied for each simulation: the files of the profile may have changed, or gone, since
        self._first_pipeline = make_pipeline(dataclasses.replace(settings, operation=True))
        self._source, self._connector, self._leadership = source, connector, leadership
        self._clock = clock
        self._loads = loads
        self._metrics = PlannerMetrics(settings.targets, wake_up.model if wake_up else "")
        self._wake_up = wake_up if settings.min_endpoint == 0 else None
        self._log_file = log_file
        self._is_log_written, self._has_warned_of_mode = True, False
        self._is_leader: bool | None = None  # at the last decision
        self._read_at = 0.0  # when the traffic was last read
        self._decisions: deque[planner_report.PlannerDecision] = deque(maxlen=_NUM_DECISIONS)
        self._last: Observation | None = None  # with fresh traffic
        self._running = tasks.Tasks()
        routes = {
            ("GET", "/planner/decisions"): self._answer_decisions,
            ("GET", "/metrics"): self._answer_metrics,
            ("GET", "/health"): lambda request: request.respond(200, b'{"status":"ready"}'),
        }
        self._server = server.HttpServer(
            exchange.HttpRouter(routes, error_body=server.plain_error),
            error_body=server.plain_error,
        )

    async def start(self, host: str, port: int) -> int:
        """Begin to decide; return the port of the HTTP server. Raises ConfigError."""
        bound_port = await self._server.start(host, port, port_flag="--planner-port")
        if self._settings.operation:  # one that only tells must not keep another one from acting
            await self._leadership.join()
        for load in self._loads:
            await load.start()
        self._running.start("decide", self._decide_for_ever())
        return bound_port

    async def run(self, stop: asyncio.Event) -> None:
        """Wait for `stop`. Raises the error of a task that died."""
        await self._running.run_until(stop)

    async def close(self) -> None:
        """Decide no more; the workers stay."""
        await self._running.close()
        try:
            await self._leadership.leave()
        except errors.DynamoError as error:  # the workers are to drain all the same
            _logger.info("others learn by the end of a lease that this planner is gone: %s", error)
        await self._server.close()

    async def _decide_for_ever(self) -> None:
        self._read_at = self._clock.now() - self._settings.adjustment_interval
        while True:
            try:
                await self._decide_once()
            except errors.DynamoError as error:
                _logger.warning("no decision: %s", error)
            await self._clock.sleep(self._settings.adjustment_interval)

    async def _decide_once(self) -> None:
        is_leader = await self._leadership.is_leader()
        takes_over = is_leader and self._is_leader is False
        self._is_leader = is_leader
        observation = await self._observe(takes_over=takes_over)
        decision = self._pipeline.decide(observation)
        if takes_over:
            reason = f"another planner is gone, this one observes first; {decision.reason}"
            decision = dataclasses.replace(
                decision, outcome="skipped", replicas=decision.present, reason=reason
            )
        self._tell(observation, decision, is_leader=is_leader)
        if not (is_leader and self._settings.operation):
            return
        if self._wake_up is not None:
            decode = observation.decode
            startup_s = decode.startup_s or self._settings.startup_time
            # a request waits for the next decision, too
            startup_s += self._settings.adjustment_interval
            # before the last worker goes: until the next decision requests would be refused
            is_asleep = not (decode.num_ready and decision.replicas.decode)
            await self._wake_up.update(is_asleep=is_asleep, startup_s=startup_s)
        if not takes_over:
            await self._connector.scale(decision)

    async def _observe(self, *, takes_over: bool) -> Observation:
        """Read traffic, pools and load of the interval that ends now; the pipeline forgets what lies before a gap."""
        interval_s, now = self._settings.adjustment_interval, self._clock.now()
        elapsed_s, self._read_at = now - self._read_at, now  # discovery may have been away before
        stood_still = not 0 < elapsed_s < max(_STOOD_STILL_S, STALE_INTERVALS * interval_s)
        traffic = await self._source.read(interval_s if stood_still else elapsed_s)
        if stood_still:
            traffic = Stale(elapsed_s, "the planner stood still or failed, or its clock jumped")
        if takes_over or stood_still:
            self._pipeline.forget()
        prefill, decode = await self._connector.observe()
        if prefill.num_ordered and self._settings.mode == "agg" and not self._has_warned_of_mode:
            self._has_warned_of_mode = True
            _logger.warning(
                "--mode agg leaves %d prefill workers as they are; --mode disagg scales both pools",
                prefill.num_ordered,
            )
        prefill_load, decode_load = (load.read() for load in self._loads)
        held = self._source.frontend_load
        if not decode.num_ready:  # frontends hold what no worker can take
            decode_load = dataclasses.replace(decode_load, num_waiting=held.num_open)
        if prefill.num_ready:
            prefill_load = add_queued(prefill_load, held)
        elif decode.num_ready:
            decode_load = add_queued(decode_load, held)
        return Observation(
            at=self._clock.now(),
            interval_s=elapsed_s,
            traffic=traffic,
            prefill=prefill,
            decode=decode,
            prefill_load=prefill_load,
            decode_load=decode_load,
            num_open=held.num_open,
        )

    def _tell(self, observation: Observation, decision: Decision, *, is_leader: bool) -> None:
        self._metrics.record(observation, decision, is_leader=is_leader)
        line = decision.line if is_leader else f"standing by, another planner acts; {decision.line}"
        level = logging.DEBUG if decision.outcome == "hold" else logging.INFO
        _logger.log(level, "%s", line)
        if isinstance(observation.traffic, Fresh):
            self._last = observation
        entry = _make_entry(self._clock.wall(), observation, decision, is_leader=is_leader)
        self._decisions.append(entry)
        if self._log_file is None:
            return
        try:
            with self._log_file.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:  # such as a full disk: it costs the line
            if self._is_log_written:
                _logger.warning("decisions are not written to %s: %s", self._log_file, error)
            self._is_log_written = False
        else:
            self._is_log_written = True

    def _answer_decisions(self, request: exchange.Exchange) -> None:
        rows = list(self._decisions)[::-1]
        request.respond(200, msgspec.json.encode({"decisions": rows}))

    def answer_report(self, call: requests.Call) -> None:
        """Answer a `PlannerQuery` of a frontend."""
        try:
            query = msgspec.msgpack.decode(call.body, type=planner_report.PlannerQuery)
        except msgspec.MsgspecError as error:
            call.fail(errors.InvalidRequest(f"expected a query for a planner: {error}"))
            return
        if query.factor is not None and not 0 <= query.factor <= planner_report.MOST_FACTOR:
            expected = f"expected a factor from 0 to {planner_report.MOST_FACTOR}"
            call.fail(errors.InvalidRequest(f"{expected}, got {query.factor:g}"))
            return
        self._running.start("report", self._report(call, query))

    async def _report(self, call: requests.Call, query: planner_report.PlannerQuery) -> None:
        rows = list(self._decisions)[: -planner_report.MOST_DECISIONS - 1 : -1]
        what_if = None
        if query.factor is not None and self._last is not None:
            what_if = await asyncio.to_thread(self._simulate, self._last, query.factor)
        call.reply(
            planner_report.PlannerReport(
                namespace=self._leadership.namespace,
                policy=self._settings.policy,
                mode=self._settings.mode,
                interval_s=self._settings.adjustment_interval,
                decisions=rows,
                what_if=what_if,
            )
        )
        call.finish()

    def _simulate(self, last: Observation, factor: float) -> list[planner_report.PlannerDecision]:
        """Return what the policy would do under `factor` times the last load, if the planner might act."""
        settings = self._settings
        assert isinstance(last.traffic, Fresh)
        interval_s = settings.adjustment_interval
        startup_s = last.decode.startup_s or settings.startup_time
        traffic = last.traffic.value
        per_interval = traffic.num_requests * interval_s / last.interval_s
        steps = scaling_pipeline.simulate(
            copy.deepcopy(self._first_pipeline),
            last,
            dataclasses.replace(traffic, num_requests=per_interval),
            factor=factor,
            interval_s=interval_s,
            horizon_s=2 * settings.stabilization_s + 5 * startup_s,
            startup_s=startup_s,
        )
        return [_make_entry(seen.at, seen, decision, is_leader=True) for seen, decision in steps]

    def _answer_metrics(self, request: exchange.Exchange) -> None:
        request.respond(200, self._metrics.registry.render(), content_type=observed.CONTENT_TYPE)


def _make_entry(
    at: float, observation: Observation, decision: Decision, *, is_leader: bool
) -> planner_report.PlannerDecision:
    measured: dict[str, float | None] = {}
    if isinstance(observation.traffic, Fresh):
        traffic = observation.traffic.value
        measured = {
            "requests_per_s": traffic.num_requests / observation.interval_s,
            "isl": traffic.isl,
            "osl": traffic.osl,
            "ttft_ms": None if traffic.ttft_s is None else 1000 * traffic.ttft_s,
            "itl_ms": None if traffic.itl_s is None else 1000 * traffic.itl_s,
        }
    prediction = decision.proposal.prediction if decision.proposal is not None else None
    if prediction is not None:
        measured["predicted_requests_per_s"] = prediction.requests_per_s
    return planner_report.PlannerDecision(
        time=at,
        outcome=decision.outcome,
        is_leader=is_leader,
        present=planner_report.Workers(*decision.present),
        replicas=planner_report.Workers(*decision.replicas),
        reason=decision.reason,
        kv_usage=observation.decode_load.kv_usage,
        num_running=observation.decode_load.num_running,
        num_waiting=observation.prefill_load.num_waiting + observation.decode_load.num_waiting,
        **measured,
    )
