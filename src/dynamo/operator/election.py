"""The election of the operator that acts, by a Lease: the others wait, and one of them takes over.

A holder that cannot renew its Lease pauses: it writes nothing from `_ACT_S` after the last renewal on, which is well
before others may take the Lease, and goes on when it has renewed it. So an API server that does not answer, and a
machine that gives the operator no time, end nothing. Only a Lease that another operator has taken is lost.

An operator that is restricted to one namespace has a Lease there, by which that of the whole cluster leaves it alone.
"""

import contextlib
import logging
import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.operator.objects import Object
from dynamo.runtime.backends.kubernetes import connection

LEASE_S, RENEW_S = 30.0, 5.0
_ATTEMPT_S, _RETRY_S = 5.0, 1.0  # a busy cluster gets several attempts within one lease
_ACT_S = LEASE_S - 2 * _ATTEMPT_S  # what is sent until then is stored before others may act
_API, _KIND = "coordination.k8s.io/v1", "Lease"
_logger = logging.getLogger(__name__)


class LeaseLost(errors.Unavailable):
    """The Lease has not been renewed in time: another operator may act, and this one must not write."""

    code = "lease_lost"


def lease_name(namespace: str = "") -> str:
    """Return the name of the Lease of operators of the whole cluster, or of those restricted to a namespace."""
    return f"dynamo-operator{'-' if namespace else ''}{namespace}"


class Election:
    """The candidacy of one operator. Time is measured here, so clocks of other hosts may differ."""

    def __init__(
        self,
        cluster: connection.KubernetesConnection,
        clock: clocks.Clock,
        *,
        identity: str,
        name: str,
        namespace: str,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._identity = identity
        self._name, self._namespace = name, namespace
        self._observed_revision: tuple[str, float] = (
            "",
            0.0,
        )  # revision of another's lease, and since when
        self._renewed_at = -math.inf
        # of operators that are restricted to a namespace: their Lease's revision, since when, and when it was read
        self._restricted: dict[str, tuple[str, float, float]] = {}

    @property
    def is_held(self) -> bool:
        """Return True while no other operator can have the Lease."""
        return self._clock.now() - self._renewed_at <= _ACT_S

    def check_held(self) -> None:
        """Raise LeaseLost unless this operator may write."""
        if not self.is_held:
            raise LeaseLost(
                f"the lease {self._name} has not been renewed for {_ACT_S:g} s: this operator does not write"
            )

    async def wait_until_held(self) -> None:
        """Return when this operator may write."""
        while not self.is_held:
            await self._clock.sleep(_RETRY_S)

    async def is_left(self, namespace: str) -> bool:
        """Return True while an operator that is restricted to a namespace renews its Lease. Raises Unavailable."""
        now = self._clock.now()
        nothing = ("", now, -math.inf)
        revision, changed_at, read_at = self._restricted.get(namespace, nothing)
        if now - read_at >= RENEW_S:
            lease = None
            async with self._limit_attempt():
                with contextlib.suppress(errors.Forbidden):  # by roles of an earlier chart
                    lease = await self._cluster.get(_API, _KIND, lease_name(namespace), namespace)
            holder = (lease or {"spec": {}})["spec"].get("holderIdentity")
            present = lease["metadata"]["resourceVersion"] if lease and holder else ""
            if present != revision:
                revision, changed_at = present, now
            self._restricted[namespace] = revision, changed_at, now
        return bool(revision) and now - changed_at <= LEASE_S

    def forget(self, namespace: str) -> None:
        """Drop what is known of the Lease in a namespace."""
        self._restricted.pop(namespace, None)

    async def acquire(self) -> None:
        """Wait until this operator has the Lease."""
        while True:
            try:
                if await self._try(is_renewal=False):
                    _logger.info("%s has the lease %s", self._identity, self._name)
                    return
            except (errors.Unavailable, errors.Conflict) as error:
                _logger.warning("no lease yet: %s", error)
            await self._clock.sleep(RENEW_S / 2)

    async def keep(self) -> None:
        """Renew the Lease until another operator has it."""
        pause_s = RENEW_S
        while True:
            await self._clock.sleep(pause_s)
            try:
                if not await self._try(is_renewal=True):
                    break
                pause_s = RENEW_S
            except errors.DynamoError as error:
                _logger.warning("the lease is to be renewed: %s", error)
                pause_s = _RETRY_S if self.is_held else RENEW_S / 2
        self._renewed_at = -math.inf
        _logger.warning("the lease %s was taken by another operator", self._name)

    async def release(self) -> None:
        """Give the Lease to others at once. Raises Unavailable if the cluster does not answer soon."""
        async with self._limit_attempt():
            lease = await self._cluster.get(_API, _KIND, self._name, self._namespace)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                await self._write(lease, {"holderIdentity": "", "leaseDurationSeconds": 1})

    @contextlib.asynccontextmanager
    async def _limit_attempt(self) -> AsyncIterator[None]:
        try:
            async with self._clock.timeout(_ATTEMPT_S):
                yield
        except TimeoutError as error:
            raise errors.Unavailable(f"no answer within {_ATTEMPT_S:g} s") from error

    async def _try(self, *, is_renewal: bool) -> bool:
        """Take or renew the Lease; return False while it is another's. Raises Conflict if it changed meanwhile.

        A renewal does not take a Lease that another operator has had meanwhile, whose writes this one may not know yet.
        """
        started_at = self._clock.now()
        async with self._limit_attempt():
            is_held = await self._take(is_renewal=is_renewal)
        if is_held:
            self._renewed_at = started_at
        return is_held

    async def _take(self, *, is_renewal: bool) -> bool:
        lease = await self._cluster.get(_API, _KIND, self._name, self._namespace)
        now = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Object = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_S),
            "renewTime": now,
        }
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            new_lease = {"apiVersion": _API, "kind": _KIND, "metadata": metadata}
            await self._cluster.create({**new_lease, "spec": {**spec, "acquireTime": now}})
            return True
        if lease["spec"].get("holderIdentity") != self._identity:
            if is_renewal or not self._has_expired(lease):
                return False
            transitions = lease["spec"].get("leaseTransitions") or 0
            spec |= {"acquireTime": now, "leaseTransitions": transitions + 1}
        await self._write(lease, spec)
        return True

    async def _write(self, lease: Object, spec: Object) -> None:
        changes = {
            "metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]},
            "spec": spec,
        }
        await self._cluster.patch(_API, _KIND, self._name, changes, self._namespace)

    def _has_expired(self, lease: Object) -> bool:
        """Return True for a lease that is free, or that its holder has not renewed for its duration."""
        if not lease["spec"].get("holderIdentity"):
            return True
        revision = lease["metadata"]["resourceVersion"]
        if self._observed_revision[0] != revision:
            self._observed_revision = revision, self._clock.now()
            return False
        duration_s = lease["spec"].get("leaseDurationSeconds") or LEASE_S
        return self._clock.now() - self._observed_revision[1] > float(duration_s)
