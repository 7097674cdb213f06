"""The doer behind the deciders: reads what concerns one object, decides, and writes what differs.

All writes are server-side applies of one field manager, so fields that others set stay theirs, and an apply that
changes nothing is no write. One that is known to change nothing is not even sent: the operator remembers what it
applied and what the object looked like then, and sends again only when one of the two has changed. So drift is
repaired, and an idle operator sends nothing.
"""

import asyncio
import dataclasses
import logging
import secrets

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.operator import (
    api_types,
    causes,
    component,
    graph,
    models,
    objects,
    pod_calls,
    pod_template,
    profiling_requests,
)
from dynamo.operator.object_cache import ROOTS, Key, ObjectCache, key_of
from dynamo.operator.objects import FIELD_MANAGER, Object, Reconciliation
from dynamo.operator.settings import OperatorConfig
from dynamo.runtime.backends.kubernetes import connection

_POLL_S = (
    1.0  # between two looks at the frontends during an update, and at workers without their adapter
)
_START_POLL_S = 3.0  # between two looks at workers that start
ABSENT_SECRET_POLL_S = 60.0  # Secrets are not watched
_WEBHOOK_FAILED = "failed calling webhook"  # a 500 by a webhook of others, not of a cluster away
_UNSTABLE = ("resourceVersion", "managedFields", "generation")
_logger = logging.getLogger(__name__)


class Reconciler:
    """Brings single objects nearer to their spec. One call at a time for each object."""

    def __init__(
        self,
        cluster: connection.KubernetesConnection,
        cache: ObjectCache,
        settings: OperatorConfig,
        clock: clocks.Clock,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._settings = settings
        self._clock = clock
        self._applied: dict[
            Key, tuple[str, str]
        ] = {}  # digests of what was applied, and of the answer
        self._heard_frontends: set[str] = set()  # uids of pods

    async def reconcile(self, key: Key) -> float | None:
        """Write what an object needs; return the seconds after which to look again, None to wait for events.

        Raises Unavailable, RequestError or ConfigError for a write that the cluster refuses.
        """
        root = self._cache.get(key)
        if root is None:
            return None
        now = objects.format_time(self._clock.wall())
        observed = self._cache.observe(root, now)
        if key[0] == "DynamoModel":
            return await self._reconcile_model(root, observed)
        if "deletionTimestamp" in root["metadata"]:
            return None
        if key[0] == "DynamoGraphDeploymentRequest":
            pod = profiling_requests.find_finished_pod(root, observed)
            log = await self._cluster.read_log(pod, key[1], tail_lines=20) if pod else ""
            decision = profiling_requests.decide(root, observed, self._settings, log)
            await self._carry_out(root, decision, now)
            return None
        is_updating = graph.is_updating(root, observed)
        if is_updating:
            instances = await pod_calls.count_admitted(observed.pods, self._heard_frontends)
            # the workers as they are by now: one of them may have died meanwhile
            observed = dataclasses.replace(self._cache.observe(root, now), instances=instances)
        starting: dict[str, tuple[str, int]] = {}
        is_secret_absent = False
        if key[0] == "DynamoGraphDeployment":
            token_name = find_token_name(root, observed, self._settings)
            await self._look_up_secret(key[1], token_name)
            decision = graph.decide(root, observed, self._settings, secrets.token_hex(32))
        else:
            secret = root["spec"].get("envFromSecret")
            for name in (secret, component.find_token_name(root)):
                await self._look_up_secret(key[1], name)
            is_secret_absent = bool(secret) and observed.find("Secret", secret) is None
            starting = find_starting(observed.pods_of(key[2]))
            observed = dataclasses.replace(observed, starts=await pod_calls.read_starts(starting))
            decision = component.decide(root, observed, self._settings, secrets.token_hex(32))
        await self._carry_out(root, decision, now)
        if is_updating:
            return _POLL_S
        if starting:
            return _START_POLL_S
        return ABSENT_SECRET_POLL_S if is_secret_absent else None

    async def _carry_out(self, root: Object, decision: Reconciliation, now: str) -> None:
        try:
            await self._act(decision, root["metadata"]["namespace"])
        except errors.Conflict:  # something has changed meanwhile: the next look sees it
            raise
        except (errors.RequestError, errors.Unavailable, connection.KindMissing) as error:
            is_away = isinstance(error, errors.Unavailable) and _WEBHOOK_FAILED not in str(error)
            if not is_away:
                await self._write_failure(root, decision, str(error), now)
            raise
        await self._write_status(root, decision.status)
        for item in decision.other_statuses:
            await self._write_status(self._cache.get(key_of(item)) or item, item["status"])

    async def _reconcile_model(self, root: Object, observed: objects.Observed) -> float | None:
        """Have all workers of a base model load an adapter or, while it is being deleted, unload it."""
        spec, metadata = api_types.read_spec(root, api_types.ModelSpec), root["metadata"]
        is_leaving, finalizers = "deletionTimestamp" in metadata, metadata.get("finalizers") or []
        endpoints = models.find_endpoints(spec.base_model_name, observed)
        failures = dict.fromkeys(endpoints, "the worker is not ready yet")
        asked = [endpoint for endpoint in endpoints if endpoint.is_ready or is_leaving]
        is_kept = is_leaving and models.is_shared(root, observed)
        if models.needs_adapter(spec) and spec.source is not None and not is_kept:
            if not is_leaving and models.FINALIZER not in finalizers:
                await self._set_finalizers(root, [*finalizers, models.FINALIZER])
            uri = None if is_leaving else spec.source.uri
            outcomes = await asyncio.gather(
                *(
                    pod_calls.change_adapter(entry.address, entry.port, spec.model_name, uri)
                    for entry in asked
                )
            )
        else:
            outcomes = [""] * len(asked)
        failures |= dict(zip(asked, outcomes, strict=True))
        is_unfinished = any(failures[entry] for entry in asked if entry.is_ready)
        if not is_leaving:
            await self._write_status(root, models.make_status(root, failures, observed.now))
        elif models.FINALIZER in finalizers and not is_unfinished:
            remaining = [name for name in finalizers if name != models.FINALIZER]
            await self._set_finalizers(root, remaining)
            return None
        return _POLL_S if is_unfinished else None

    async def _set_finalizers(self, root: Object, finalizers: list[str]) -> None:
        metadata = root["metadata"]
        changes = {"resourceVersion": metadata["resourceVersion"], "finalizers": finalizers}
        address = root["apiVersion"], root["kind"], metadata["name"]
        try:
            changed = await self._cluster.patch(
                *address, {"metadata": changes}, metadata["namespace"]
            )
        except connection.ObjectMissing:
            return
        if finalizers or "deletionTimestamp" not in metadata:  # else it is gone by this
            self._cache.put(changed)

    def forget(self, resource: Object) -> None:
        """Drop what is remembered of an object that is gone."""
        self._applied.pop(key_of(resource), None)
        self._heard_frontends.discard(resource["metadata"].get("uid", ""))

    async def _act(self, decision: Reconciliation, namespace: str) -> None:
        for item in decision.create:
            try:
                self._cache.put(await self._cluster.create(item, field_manager=FIELD_MANAGER))
            except errors.Conflict:
                _logger.debug("%s exists already", key_of(item))
        for item in decision.patch:
            metadata = item["metadata"]
            address = item["apiVersion"], item["kind"], metadata["name"]
            try:
                patched = await self._cluster.patch(
                    *address, {"metadata": metadata}, metadata["namespace"]
                )
            except (errors.Conflict, connection.ObjectMissing):
                existing = self._cache.get(key_of(item))
                if existing is not None and item["kind"] == "Secret":  # not watched: looked up anew
                    self._cache.remove(existing)
                raise
            self._cache.put(patched)
        for item in decision.apply:
            await self._apply(item)
        for reference in decision.delete:
            existing = self._cache.get((reference.kind, namespace, reference.name))
            if existing is not None:
                await self._cluster.delete(
                    reference.api_version,
                    reference.kind,
                    reference.name,
                    namespace,
                    propagation="Background",
                    preconditions={"uid": existing["metadata"]["uid"]},
                )

    async def _apply(self, item: Object) -> None:
        key = key_of(item)
        desired = objects.digest(item, 64)
        existing = self._cache.get(key)
        if existing is not None and self._applied.get(key) == (
            desired,
            digest_of_lasting(existing),
        ):
            return
        answer = await self._take(item, existing)
        self._cache.put(answer)
        self._applied[key] = desired, digest_of_lasting(answer)
        autoscaler = self._cache.get(
            ("HorizontalPodAutoscaler", *key[1:])
        )  # ours: it is being replaced
        message = existing and not autoscaler and objects.explain_scaling(existing, item)
        if message:
            graph_name = item["metadata"]["labels"].get(objects.GRAPH_LABEL, "")
            graph = self._cache.get(("DynamoGraphDeployment", key[1], graph_name))
            for about in filter(None, (answer, graph)):
                identity = about["metadata"]["uid"], message  # an autoscaler may repeat it for ever
                suffix = objects.digest(identity, 16)
                await self._write_event(about, "ReplicasPutBack", message, suffix)

    async def _take(self, item: Object, existing: Object | None) -> Object:
        """Apply an object over what others set in it, unless it is theirs. Raises InvalidRequest then.

        Objects without our label are not watched, so one that is not known here is applied without force first.
        """
        if existing is None:
            try:
                return await self._cluster.apply(item, FIELD_MANAGER)
            except errors.Conflict:
                _, namespace, name = key_of(item)
                field = f"metadata.name={name}"
                kind = item["apiVersion"], item["kind"]
                same_named = await self._cluster.list(*kind, namespace, fields=field)
                existing = next(iter(same_named), None)
        if existing is not None and self._is_foreign(existing, item):
            owners = existing["metadata"].get("ownerReferences") or [{"kind": "none", "name": ""}]
            names = ", ".join(f"{owner['kind']} {owner['name']}".strip() for owner in owners)
            raise errors.InvalidRequest(
                f"there is a {item['kind']} {item['metadata']['name']} already that is not of this deployment (its"
                f" owner: {names}): delete it, or give the deployment or the service another name"
            )
        return await self._cluster.apply(item, FIELD_MANAGER, force=True)

    def _is_foreign(self, existing: Object, desired: Object) -> bool:
        """Return True for an object that the operator did not make, or made for another owner that is still there."""
        owners = existing["metadata"].get("ownerReferences") or ()
        if not owners:  # restored from a backup, perhaps
            names = (objects.MANAGED_BY, objects.GRAPH_LABEL)
            labels = [
                [objects.labels_of(item).get(name) for name in names]
                for item in (existing, desired)
            ]
            return labels[0] != labels[1]
        own = {entry["uid"] for entry in desired["metadata"]["ownerReferences"]}
        is_own = any(entry["uid"] in own for entry in owners)
        return not is_own and any(self._is_there(entry, existing) for entry in owners)

    def _is_there(self, owner: Object, owned: Object) -> bool:
        """Return False for an owner that is gone, as far as the operator knows owners of that kind."""
        root = self._cache.get((owner["kind"], owned["metadata"]["namespace"], owner["name"]))
        if root is None:
            return owner["kind"] not in ROOTS
        return bool(root["metadata"]["uid"] == owner["uid"])

    async def _write_status(self, root: Object, status: Object) -> None:
        present = root.get("status") or {}
        if all(present.get(name) == value for name, value in status.items()):
            return
        item = {**objects.address_of(root), "status": status}
        try:
            self._cache.put(await self._cluster.apply_status(item, FIELD_MANAGER, force=True))
        except connection.ObjectMissing:
            return
        old, new = ((entry.get("conditions") or [{}])[0] for entry in (present, status))
        if new and (old.get("status"), old.get("reason")) != (new["status"], new["reason"]):
            kind, suffix = "Normal" if new["status"] == "True" else "Warning", secrets.token_hex(8)
            await self._write_event(root, new["reason"], new["message"], suffix, kind)

    async def _write_event(
        self, root: Object, reason: str, message: str, suffix: str, kind: str = "Warning"
    ) -> None:
        """Write an event about an object, once for each suffix; a cluster that refuses events loses nothing else."""
        now = objects.format_time(self._clock.wall())
        metadata = root["metadata"]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{suffix}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": root["apiVersion"],
                "kind": root["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message[:1024],
            "type": kind,
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._cluster.create(event, field_manager=FIELD_MANAGER)
        except errors.DynamoError as error:
            _logger.info("no event for %s: %s", metadata["name"], error)

    async def _write_failure(
        self, root: Object, decision: Reconciliation, message: str, now: str
    ) -> None:
        """Say in the condition what the cluster refuses; the caller tries again."""
        if root["kind"] == "DynamoGraphDeploymentRequest":
            *before, step = decision.status["conditions"]
            refusal = objects.make_condition(step["type"], False, "Refused", message, root, now)
            status = {**decision.status, "state": "Failed", "conditions": [*before, refusal]}
            await self._write_status(root, status)
            return
        is_graph = root["kind"] == "DynamoGraphDeployment"
        name, reason = (
            ("Ready", "failed_to_reconcile_the_resources") if is_graph else ("Available", "Refused")
        )
        condition = objects.make_condition(name, False, reason, message, root, now)
        status = {
            "conditions": [condition],
            "observedGeneration": root["metadata"].get("generation", 0),
        } | ({"state": "failed"} if is_graph else {})
        await self._write_status(root, {**(root.get("status") or {}), **status})

    async def _look_up_secret(self, namespace: str, name: str | None) -> None:
        """Learn whether a Secret exists; its content is not kept.

        Secrets are asked for by name and not watched, so that the operator needs no right to list those of others.
        """
        if not name or self._cache.get(("Secret", namespace, name)):
            return
        try:
            existing = await self._cluster.get("v1", "Secret", name, namespace)
        except errors.Forbidden:
            existing = {"metadata": {"name": name, "namespace": namespace}}  # it cannot be told
        if existing is not None:
            head = {"apiVersion": "v1", "kind": "Secret"}
            self._cache.put({**head, "metadata": existing["metadata"]})


def find_token_name(
    root: Object, observed: objects.Observed, settings: OperatorConfig
) -> str | None:
    """Return the name of the Secret with a graph's cluster token; None for a graph that says something wrong."""
    try:
        namespace = graph.read_graph(root, observed, settings).dynamo_namespace
    except errors.ConfigError:
        return None
    return pod_template.token_secret_name(namespace)


def find_starting(pods: list[Object]) -> dict[str, tuple[str, int]]:
    """Return the addresses of the workers that run and are not ready, by the names of their pods."""
    return {
        pod["metadata"]["name"]: (pod["status"]["podIP"], models.find_system_port(pod))
        for pod in pods
        if pod["metadata"]["labels"].get(objects.TYPE_LABEL) == "worker" and causes.is_starting(pod)
    }


def digest_of_lasting(existing: Object) -> str:
    """Return the digest of what writers other than the status's change in an object."""
    metadata = {k: v for k, v in existing["metadata"].items() if k not in _UNSTABLE}
    content = {key: value for key, value in existing.items() if key != "status"}
    return objects.digest({**content, "metadata": metadata}, 64)


API_VERSION_BY_KIND = {
    "DynamoGraphDeployment": api_types.API_VERSION,
    "DynamoComponentDeployment": api_types.API_VERSION,
    "DynamoGraphDeploymentScalingAdapter": api_types.API_VERSION,
    "DynamoModel": api_types.API_VERSION,
    "DynamoGraphDeploymentRequest": api_types.API_VERSION,
    "Job": "batch/v1",
    "PersistentVolumeClaim": "v1",
    "Pod": "v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "Deployment": "apps/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Ingress": "networking.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodCliqueSet": "grove.io/v1alpha1",
    "VirtualService": "networking.istio.io/v1beta1",
}
