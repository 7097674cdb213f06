"""The pods of a cluster in memory as its controllers and kubelets would show them, for tests of discovery."""

import itertools

from dynamo.runtime.backends.kubernetes.discovery import KubernetesDiscovery
from memory_cluster import MemoryCluster

NAMESPACE = "test"
LABELS = {"nvidia.com/dynamo-discovery-backend": "kubernetes"}


class PlayedPods:
    """Pods, each with the discovery of its process, and the EndpointSlices that name them."""

    def __init__(self):
        self.cluster = MemoryCluster()
        self._ids = itertools.count(1)
        self._uids = {}
        self._members = []
        self._slices = {}

    async def start(self, name, *, is_ready=True, slice_="slice-1", **options):
        """Create a pod whose process opens its discovery, and enter it into a slice; return the discovery."""
        await self.create(name)
        member = await self.start_container(name, **options)
        self.set_ready(name, is_ready, slice_=slice_)
        return member

    async def create(self, name):
        """Create a pod without a process yet."""
        spec = {"containers": [{"name": "main", "image": "none.invalid/none"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        created = await self.cluster.connect(NAMESPACE).create(pod)
        self._uids[name] = created["metadata"]["uid"]

    async def start_container(self, name, **options):
        """Open the discovery of a process in a pod that exists."""
        environ = {"POD_NAME": name, "POD_UID": self._uids[name], "POD_NAMESPACE": NAMESPACE}
        member = await KubernetesDiscovery.open(self.cluster.connect(NAMESPACE), environ, **options)
        self._members.append(member)
        return member

    def remove(self, name):
        """Delete a pod, but not yet what it owns, as a cluster does that is slow to collect garbage."""
        without = {n: {k: v for k, v in e.items() if k != name} for n, e in self._slices.items()}
        self.write_slices(without)
        self.cluster.remove_object("v1", "Pod", NAMESPACE, name)

    def set_ready(self, name, is_ready, *, slice_="slice-1"):
        """Let a slice name the pod as ready or not."""
        self.write_slices(self._slices | {slice_: self._slices.get(slice_, {}) | {name: is_ready}})

    def crash(self, name):
        """End a pod's process without a word: the kubelet tells that it is not ready."""
        self.set_ready(name, False)

    def write_slices(self, slices):
        """Make these all slices there are: name -> pod -> whether it is ready."""
        for slice_ in self._slices.keys() - slices.keys():
            self.cluster.remove_object("discovery.k8s.io/v1", "EndpointSlice", NAMESPACE, slice_)
        for slice_, pods in slices.items():
            endpoints = [
                {
                    "addresses": ["192.0.2.1"],
                    "conditions": {"ready": is_ready},
                    "targetRef": {"kind": "Pod", "name": pod, "uid": self._uids[pod]},
                }
                for pod, is_ready in pods.items()
            ]
            self.cluster.put_object(
                {
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {"name": slice_, "namespace": NAMESPACE, "labels": LABELS},
                    "endpoints": endpoints,
                }
            )
        self._slices = slices

    async def close(self):
        for member in self._members:
            await member.close()
