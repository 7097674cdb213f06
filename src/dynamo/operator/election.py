"""The election of the operator that acts, by a Lease: the others watch, and one of them takes over."""

import logging
from datetime import UTC, datetime

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.operator.objects import Object
from dynamo.runtime.backends.kubernetes import connection

LEASE_S, RENEW_S = 30.0, 5.0
_ATTEMPT_S, _RETRY_S = 5.0, 1.0  # a busy cluster gets several attempts within one lease
_GIVE_UP_S = LEASE_S - 2 * _ATTEMPT_S  # the last attempt ends before others may take the lease
_API, _KIND = "coordination.k8s.io/v1", "Lease"
_logger = logging.getLogger(__name__)


class LeaseLost(errors.Unavailable):
    """Another operator acts, or the cluster could not be asked in time: this one must not act any more."""

    code = "lease_lost"


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
        self._renewed_at = 0.0

    async def acquire(self) -> None:
        """Wait until this operator has the Lease."""
        while True:
            try:
                if await self._try():
                    _logger.info("%s has the lease %s", self._identity, self._name)
                    return
            except (errors.Unavailable, errors.Conflict) as error:
                _logger.warning("no lease yet: %s", error)
            await self._clock.sleep(RENEW_S / 2)

    async def keep(self) -> None:
        """Renew the Lease until cancelled. Raises LeaseLost when it is another's, or could not be renewed in time."""
        pause_s = RENEW_S
        while True:
            await self._clock.sleep(pause_s)
            try:
                is_held = await self._try()
            except errors.DynamoError as error:
                if self._clock.now() - self._renewed_at > _GIVE_UP_S:
                    raise LeaseLost(
                        f"the lease {self._name} could not be renewed: {error}"
                    ) from error
                _logger.warning("the lease is to be renewed: %s", error)
                pause_s = _RETRY_S
                continue
            if not is_held:
                raise LeaseLost(f"the lease {self._name} was taken by another operator")
            pause_s = RENEW_S

    async def release(self) -> None:
        """Give the Lease to others at once."""
        lease = await self._cluster.get(_API, _KIND, self._name, self._namespace)
        if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
            await self._write(lease, {"holderIdentity": "", "leaseDurationSeconds": 1})

    async def _try(self) -> bool:
        """Take or renew the Lease; return False while it is another's. Raises Conflict if it changed meanwhile."""
        started_at = self._clock.now()
        try:
            async with self._clock.timeout(_ATTEMPT_S):
                is_held = await self._take()
        except TimeoutError as error:
            raise errors.Unavailable(f"no answer within {_ATTEMPT_S:g} s") from error
        if is_held:
            self._renewed_at = started_at
        return is_held

    async def _take(self) -> bool:
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
            if not self._has_expired(lease):
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
