"""What a Kubernetes pod's object says of it, for the planner as for the operator."""  # decider

from collections.abc import Mapping
from typing import Any


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Return True for a pod that runs no more, such as an evicted one, of which the cluster keeps the object."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_follower(pod: Mapping[str, Any]) -> bool:
    """Return True for a further node of a group of pods, which is one replica together with its leader."""
    labels = pod["metadata"].get("labels") or {}
    is_in_set = labels.get("leaderworkerset.sigs.k8s.io/worker-index", "0") != "0"
    clique: str = labels.get("grove.io/podclique", "")
    return is_in_set or clique.endswith("-wkr")


def is_replica(pod: Mapping[str, Any]) -> bool:
    """Return True for a pod that has not ended and counts as a replica of its service."""
    return not (has_ended(pod) or is_follower(pod))
