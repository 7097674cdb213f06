"""Deployments, replica sets, stateful sets and jobs: the controllers that create and delete pods.

Each looks at its object and at the pods or replica sets that it owns, and takes the next step; a step's effect comes
back as a change and leads to the next.
"""

import abc
import hashlib
import json
import math
from collections.abc import Hashable, Iterable
from typing import Any, cast

from dynamo.testing.kube import api, builtin_rules, metadata, pods, store

Object = dict[str, Any]
_REVISION = "deployment.kubernetes.io/revision"
_HASH = "pod-template-hash"
_JOB_RETRY_S = 10.0


class Workload(abc.ABC):
    """What the controllers of this module share: keys of one kind and its dependents, and writes in its name."""

    plural = ""
    dependents = "pods"
    group = "apps"
    version = "v1"

    def __init__(self, served: api.Api) -> None:
        self.api = served
        self.resource = served.registry.require(self.group, self.plural, self.version)
        self.pods = served.registry.require("", "pods")

    def keys_of(self, change: store.Change) -> Iterable[Hashable]:
        """Return the object itself, or the owner of a dependent."""
        meta = change.item["metadata"]
        if change.table == (self.group, self.plural):
            yield meta["namespace"], meta["name"]
        elif change.table[1] == self.dependents:
            for owner in meta.get("ownerReferences") or ():
                if owner["kind"] == self.resource.kind:
                    yield meta["namespace"], owner["name"]

    async def reconcile(self, key: Hashable) -> float | None:
        """Take the next step for one object, unless it is being deleted."""
        item = self.api.store.get(self.resource.key, cast("store.Name", key))
        if item is None or item["metadata"].get("deletionTimestamp"):
            return None
        return await self.step(item)

    @abc.abstractmethod
    async def step(self, item: Object) -> float | None:
        """Take the next step; return after how many seconds to look again."""

    def owned(self, item: Object, table: store.Table = ("", "pods")) -> list[Object]:
        """Return the dependents that an object controls, the oldest first."""
        meta = item["metadata"]
        findings = api.find_owned(self.api.store.list_items(table, meta["namespace"]), meta["uid"])
        return sorted(findings, key=lambda child: int(child["metadata"]["resourceVersion"]))

    async def create_pod(self, item: Object, meta: Object, spec: Object | None = None) -> None:
        """Create a pod from an object's template."""
        template = item["spec"]["template"]
        given_metadata = template.get("metadata") or {}
        body = {
            "metadata": {
                **given_metadata,
                **meta,
                "ownerReferences": [metadata.owner_reference(item)],
            },
            "spec": spec or template["spec"],
        }
        body["metadata"]["labels"] = {
            **(given_metadata.get("labels") or {}),
            **(meta.get("labels") or {}),
        }
        options = api.WriteOptions(manager=api.CONTROLLERS)
        pod = await self.api.create(self.pods, item["metadata"]["namespace"], body, options)
        name = pod["metadata"]["name"]
        await self.tell(item, "SuccessfulCreate", f"Created pod: {name}")

    async def delete_pod(self, pod: Object) -> None:
        """Delete a pod with its own grace period."""
        meta = pod["metadata"]
        if not meta.get("deletionTimestamp"):
            options = api.DeleteOptions(uid=meta["uid"])
            await self.api.delete(self.pods, meta["namespace"], meta["name"], options)

    async def tell(self, item: Object, reason: str, message: str) -> None:
        """Write an event about an object."""
        events = self.api.registry.require("", "events")
        body = builtin_rules.new_event(
            item, reason, message, f"{self.resource.singular}-controller", "Normal"
        )
        await self.api.create(events, item["metadata"]["namespace"], body)

    async def write_status(self, item: Object, status: Object) -> None:
        """Replace an object's status; an equal one is not written."""
        meta = item["metadata"]
        status = {
            name: value
            for name, value in status.items()
            if value not in (0, [], None) or name == "replicas"
        }
        if status != item.get("status"):
            current = await self.api.get(self.resource, meta["namespace"], meta["name"])
            options = api.WriteOptions(manager=api.CONTROLLERS, subresource="status")
            body = {**current, "status": status}
            await self.api.update(self.resource, meta["namespace"], meta["name"], body, options)


def live_pods(findings: list[Object]) -> list[Object]:
    """Return the pods that neither have ended nor are being deleted."""
    return [
        pod
        for pod in findings
        if not pod["metadata"].get("deletionTimestamp")
        and (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")
    ]


def count_available(spec: Object, live: list[Object]) -> tuple[int, float | None]:
    """Return how many pods have been ready for `minReadySeconds`, and after how many seconds the next one has."""
    least_s = spec.get("minReadySeconds") or 0
    waits = [
        builtin_rules.remaining_s(condition["lastTransitionTime"], least_s) if least_s else 0.0
        for pod in live
        for condition in (pod.get("status") or {}).get("conditions") or ()
        if condition["type"] == "Ready" and condition["status"] == "True"
    ]
    return waits.count(0.0), min(filter(None, waits), default=None)


class ReplicaSets(Workload):
    """Keeps so many pods of one template."""

    plural = "replicasets"

    async def step(self, item: Object) -> float | None:
        live, replicas = live_pods(self.owned(item)), item["spec"]["replicas"]
        meta = item["metadata"]
        for _ in range(replicas - len(live)):
            await self.create_pod(item, {"generateName": f"{meta['name']}-"})
        victims = sorted(
            live, key=lambda pod: (pods.is_ready(pod), -int(pod["metadata"]["resourceVersion"]))
        )
        for pod in victims[: max(len(live) - replicas, 0)]:
            await self.delete_pod(pod)
        live = live_pods(self.owned(item))
        available, wait_s = count_available(item["spec"], live)
        counts = {"readyReplicas": sum(map(pods.is_ready, live)), "availableReplicas": available}
        status = {"replicas": len(live), "fullyLabeledReplicas": len(live), **counts}
        await self.write_status(item, {**status, "observedGeneration": meta.get("generation")})
        return wait_s


class Deployments(Workload):
    """Rolls replica sets: that of the present template grows, and the others shrink, within the limits."""

    plural = "deployments"
    dependents = "replicasets"

    async def step(self, item: Object) -> float | None:
        table = ("apps", "replicasets")
        self.sets = self.api.registry.require(*table)
        owned = self.owned(item, table)
        mark = template_hash(item["spec"]["template"])
        current = next((s for s in owned if s["metadata"]["labels"].get(_HASH) == mark), None)
        least_s = item["spec"].get("minReadySeconds")
        if current is not None and current["spec"].get("minReadySeconds") != least_s:
            await self.api.merge(self.sets, current, {"spec": {"minReadySeconds": least_s}})
            return None
        older = [candidate for candidate in owned if candidate is not current]
        if not item["spec"].get("paused"):
            is_waiting = item["spec"]["strategy"]["type"] == "Recreate" and any(
                (old.get("status") or {}).get("replicas") or self.owned(old) for old in older
            )
            if current is None and not is_waiting:
                await self._create_set(item, mark, owned)
                return None
            await self._roll(item, current, older)
            await self._clean_up(item, older)
        elif current is not None and not any(old["spec"]["replicas"] for old in older):
            await self._scale(item, current, item["spec"]["replicas"])
        await self._report(item, current, self.owned(item, table))
        return None

    async def _create_set(self, item: Object, mark: str, owned: list[Object]) -> None:
        meta, spec = item["metadata"], item["spec"]
        revision = 1 + max((int(_revision(old)) for old in owned), default=0)
        template = json.loads(json.dumps(spec["template"]))
        labels = template.setdefault("metadata", {}).setdefault("labels", {})
        labels[_HASH] = mark
        selector = json.loads(json.dumps(spec["selector"]))
        selector.setdefault("matchLabels", {})[_HASH] = mark
        replicas = 0 if owned else spec["replicas"]
        body = {
            "metadata": {
                "name": f"{meta['name']}-{mark}",
                "labels": labels,
                "annotations": {_REVISION: str(revision)},
                "ownerReferences": [metadata.owner_reference(item)],
            },
            "spec": {"replicas": replicas, "selector": selector, "template": template},
        }
        created = await self.api.create(
            self.sets, meta["namespace"], body, api.WriteOptions(manager=api.CONTROLLERS)
        )
        await self._note_revision(item, str(revision))
        if replicas:
            name = created["metadata"]["name"]
            await self.tell(
                item, "ScalingReplicaSet", f"Scaled up replica set {name} from 0 to {replicas}"
            )

    async def _note_revision(self, item: Object, revision: str) -> None:
        if (item["metadata"].get("annotations") or {}).get(_REVISION) != revision:
            change = {"metadata": {"annotations": {_REVISION: revision}}}
            await self.api.merge(self.resource, item, change)

    async def _roll(self, item: Object, current: Object | None, older: list[Object]) -> None:
        desired = item["spec"]["replicas"]
        surge, unavailable = _limits(item["spec"])
        active = [old for old in older if old["spec"]["replicas"]]
        if current is None or item["spec"]["strategy"]["type"] == "Recreate":
            for old in active:
                await self._scale(item, old, 0)
            if current is not None:
                await self._scale(item, current, desired)
            return
        last = max((int(_revision(old)) for old in older), default=0)
        if int(_revision(current)) < last:  # an earlier template has come back
            change = {"metadata": {"annotations": {_REVISION: str(last + 1)}}}
            await self.api.merge(self.sets, current, change)
            await self._note_revision(item, str(last + 1))
        total = sum(s["spec"]["replicas"] for s in (current, *active))
        room = max(desired + surge - total, 0) if active else desired
        new = min(desired, current["spec"]["replicas"] + room) if active else desired
        await self._scale(item, current, new)
        available = sum((s.get("status") or {}).get("availableReplicas", 0) for s in (current, *active))  # fmt: skip
        removable = available - (desired - unavailable)
        for old in active:
            idle = old["spec"]["replicas"] - (old.get("status") or {}).get("availableReplicas", 0)
            count = min(old["spec"]["replicas"], max(idle, 0) + max(removable, 0))
            removable -= count - max(idle, 0)
            await self._scale(item, old, old["spec"]["replicas"] - count)

    async def _scale(self, item: Object, target: Object, replicas: int) -> None:
        before = target["spec"]["replicas"]
        if before == replicas:
            return
        await self.api.merge(self.sets, target, {"spec": {"replicas": replicas}})
        direction = "up" if replicas > before else "down"
        name = target["metadata"]["name"]
        message = f"Scaled {direction} replica set {name} from {before} to {replicas}"
        await self.tell(item, "ScalingReplicaSet", message)

    async def _clean_up(self, item: Object, older: list[Object]) -> None:
        empty = [old for old in older if not old["spec"]["replicas"] and not self.owned(old)]
        for old in empty[: max(len(empty) - item["spec"]["revisionHistoryLimit"], 0)]:
            meta = old["metadata"]
            await self.api.delete(self.sets, meta["namespace"], meta["name"])

    async def _report(self, item: Object, current: Object | None, owned: list[Object]) -> None:
        def total(field: str, among: list[Object]) -> int:
            return sum((s.get("status") or {}).get(field, 0) for s in among)

        desired, (_, unavailable) = item["spec"]["replicas"], _limits(item["spec"])
        updated = total("replicas", [current] if current else [])
        available, replicas = total("availableReplicas", owned), total("replicas", owned)
        is_available = available >= desired - unavailable
        is_done = updated == desired == available and replicas == desired
        name = current["metadata"]["name"] if current else ""
        reason = "MinimumReplicasAvailable" if is_available else "MinimumReplicasUnavailable"
        text = f"Deployment {'has' if is_available else 'does not have'} minimum availability."
        words = "has successfully progressed." if is_done else "is progressing."
        step = "NewReplicaSetAvailable" if is_done else "ReplicaSetUpdated"
        conditions = [
            make_condition(item, "Available", is_available, reason, text),
            make_condition(item, "Progressing", True, step, f'ReplicaSet "{name}" {words}'),
        ]  # fmt: skip
        status = {
            "observedGeneration": item["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": updated,
            "readyReplicas": total("readyReplicas", owned),
            "availableReplicas": available,
            "unavailableReplicas": max(desired - available, 0),
            "conditions": conditions,
        }
        await self.write_status(item, status)


def _revision(item: Object) -> str:
    return str((item["metadata"].get("annotations") or {}).get(_REVISION, "0"))


def _limits(spec: Object) -> tuple[int, int]:
    """Return the pods that may be too many, and too few, while a deployment rolls."""
    rolling = spec["strategy"].get("rollingUpdate") or {}
    surge = _share(rolling.get("maxSurge", 0), spec["replicas"], math.ceil)
    unavailable = _share(rolling.get("maxUnavailable", 0), spec["replicas"], math.floor)
    return surge, unavailable if surge or unavailable else 1


def _share(value: Any, replicas: int, rounded: Any) -> int:
    if isinstance(value, str) and value.endswith("%"):
        return int(rounded(int(value[:-1]) * replicas / 100))
    return int(value)


def template_hash(template: Object) -> str:
    """Return the name part that stands for a pod template."""
    text = json.dumps(template, sort_keys=True).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:6])
    return "".join("bcdfghjklmnpqrstvwxz2456789"[number // 27**n % 27] for n in range(10))


def make_condition(item: Object, kind: str, is_true: bool, reason: str, message: str) -> Object:
    """Return a condition; its times stay as they were while it says the same."""
    now = metadata.timestamp()
    status = "True" if is_true else "False"
    condition = {
        "type": kind,
        "status": status,
        "lastTransitionTime": now,
        "reason": reason,
        "message": message,
    }
    if item["kind"] == "Deployment":  # other kinds have no such field
        condition["lastUpdateTime"] = now
    for before in (item.get("status") or {}).get("conditions") or ():
        if before["type"] == kind and before["status"] == status:
            condition["lastTransitionTime"] = before["lastTransitionTime"]
            is_same = (before["reason"], before["message"]) == (reason, message)
            if is_same and "lastUpdateTime" in condition:
                condition["lastUpdateTime"] = before["lastUpdateTime"]
    return condition


class StatefulSets(Workload):
    """Keeps numbered pods, each with its own claims; started in order, updated and removed from the highest."""

    plural = "statefulsets"

    async def step(self, item: Object) -> float | None:
        name, spec = item["metadata"]["name"], item["spec"]
        revision = f"{name}-{template_hash(spec['template'])}"
        by_number = {
            int(pod["metadata"]["name"].rpartition("-")[2]): pod for pod in self.owned(item)
        }
        is_parallel = spec["podManagementPolicy"] == "Parallel"
        for number in range(spec["replicas"]):
            pod = by_number.get(number)
            if pod is None:
                await self._create(item, number, revision)
            if not is_parallel and (pod is None or not pods.is_ready(pod)):
                break
        else:
            await self._shrink(item, by_number, revision)
        live = live_pods(self.owned(item))
        available, wait_s = count_available(spec, live)
        updated = sum(
            pod["metadata"]["labels"].get("controller-revision-hash") == revision for pod in live
        )
        status = {"observedGeneration": item["metadata"]["generation"], "replicas": len(live),
                  "readyReplicas": sum(map(pods.is_ready, live)), "availableReplicas": available,
                  "currentReplicas": updated, "updatedReplicas": updated, "currentRevision": revision,
                  "updateRevision": revision}  # fmt: skip
        await self.write_status(item, status)
        return wait_s

    async def _shrink(self, item: Object, by_number: dict[int, Object], revision: str) -> None:
        """Remove the highest pod that is too many or of an older template, one after the other."""
        is_whole = by_number.keys() >= set(range(item["spec"]["replicas"]))
        if not is_whole or any(p["metadata"].get("deletionTimestamp") for p in by_number.values()):
            return
        strategy = item["spec"]["updateStrategy"]
        first = (strategy.get("rollingUpdate") or {}).get("partition", 0)
        for number, pod in sorted(by_number.items(), reverse=True):
            labels = pod["metadata"].get("labels") or {}
            is_old = labels.get("controller-revision-hash") != revision
            is_updated = strategy["type"] != "OnDelete" and number >= first
            if number >= item["spec"]["replicas"] or (is_old and is_updated):
                await self.delete_pod(pod)
                return
            if not pods.is_ready(pod):  # where pods start in parallel
                return

    async def _create(self, item: Object, number: int, revision: str) -> None:
        meta, spec = item["metadata"], json.loads(json.dumps(item["spec"]["template"]["spec"]))
        name = f"{meta['name']}-{number}"
        claims = self.api.registry.require("", "persistentvolumeclaims")
        for claim in item["spec"].get("volumeClaimTemplates") or ():
            volume_name = claim["metadata"].get("name", "")
            claim_name = f"{volume_name}-{name}"
            if self.api.store.get(claims.key, (meta["namespace"], claim_name)) is None:
                body = {"metadata": {"name": claim_name}, "spec": claim["spec"]}
                await self.api.create(claims, meta["namespace"], body)
            volume = {
                "name": volume_name,
                "persistentVolumeClaim": {"claimName": claim_name},
            }
            spec.setdefault("volumes", []).append(volume)
        spec |= {"hostname": name, "subdomain": item["spec"].get("serviceName", "")}
        labels = {"statefulset.kubernetes.io/pod-name": name, "apps.kubernetes.io/pod-index": str(number),
                  "controller-revision-hash": revision}  # fmt: skip
        await self.create_pod(item, {"name": name, "labels": labels}, spec)


class Jobs(Workload):
    """Runs pods until so many have succeeded, or too many have failed."""

    plural = "jobs"
    group = "batch"

    async def step(self, item: Object) -> float | None:
        spec, owned = item["spec"], self.owned(item)
        status = dict(item.get("status") or {})
        for condition in status.get("conditions") or ():
            if condition["status"] == "True":
                return await self._expire(item, condition["lastTransitionTime"])
        phases = [(pod.get("status") or {}).get("phase") for pod in owned]
        succeeded, failed = phases.count("Succeeded"), phases.count("Failed")
        live = live_pods(owned)
        active = len(live)
        began_at = status.get("startTime") or metadata.timestamp()
        status |= {
            "startTime": None if spec.get("suspend") else began_at,
            "succeeded": succeeded,
            "failed": failed,
        }
        left_s = None
        if status["startTime"] and "activeDeadlineSeconds" in spec:
            left_s = builtin_rules.remaining_s(began_at, spec["activeDeadlineSeconds"])
        if succeeded >= spec["completions"]:
            status["completionTime"] = metadata.timestamp()
            text = "Reached expected number of succeeded pods"
            status["conditions"] = [
                make_condition(item, "Complete", True, "CompletionsReached", text)
            ]
        elif failure := _find_failure(spec, failed, live, left_s):
            status["conditions"] = [make_condition(item, "Failed", True, *failure)]
            active = 0
            for pod in live:
                await self.delete_pod(pod)
        else:
            missing = min(spec["parallelism"], spec["completions"] - succeeded) - active
            if missing > 0 and phases[-1:] == ["Failed"] and not _is_rested(owned[-1]):
                return min(_JOB_RETRY_S / 10, left_s or _JOB_RETRY_S)
            for _ in range(missing if not spec.get("suspend") else 0):
                await self.create_pod(item, {"generateName": f"{item['metadata']['name']}-"})
                active += 1
        await self.write_status(
            item, {**status, "active": active, "ready": sum(map(pods.is_ready, owned))}
        )
        return left_s

    async def _expire(self, item: Object, ended_at: str) -> float | None:
        """Delete a job that has ended, with its pods, when it has been kept as long as it asks for."""
        kept_s, meta = item["spec"].get("ttlSecondsAfterFinished"), item["metadata"]
        if kept_s is None or (left_s := builtin_rules.remaining_s(ended_at, kept_s)):
            return None if kept_s is None else left_s
        options = api.DeleteOptions(policy="Foreground", uid=meta["uid"])
        await self.api.delete(self.resource, meta["namespace"], meta["name"], options)
        return None


def _find_failure(
    spec: Object, num_failed: int, live: list[Object], left_s: float | None
) -> tuple[str, str] | None:
    """Return reason and message of a job that has failed, or None if it has not."""
    restarts, limit = sum(map(_count_restarts, live)), spec["backoffLimit"]
    is_restarting = spec["template"]["spec"]["restartPolicy"] == "OnFailure" and restarts > 0
    if num_failed > limit or (is_restarting and restarts >= limit):
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    if left_s == 0:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    return None


def _count_restarts(pod: Object) -> int:
    status = pod.get("status") or {}
    fields = ("initContainerStatuses", "containerStatuses")
    return sum(state["restartCount"] for field in fields for state in status.get(field) or ())


def _is_rested(pod: Object) -> bool:
    """Return whether the pause after a failed pod is over."""
    ends = [
        state["terminated"]["finishedAt"]
        for container in (pod.get("status") or {}).get("containerStatuses") or ()
        if "terminated" in (state := container["state"])
    ]
    return not ends or max(ends) < builtin_rules.timestamp_after(-_JOB_RETRY_S)
