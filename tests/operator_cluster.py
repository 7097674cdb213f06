"""A cluster of dictionaries for tests of the operator's deciders: objects, and Deployments that get pods in steps."""

import copy
import itertools

import msgspec

from dynamo.operator import component, graph, objects
from dynamo.operator.settings import OperatorConfig

NOW = "2026-11-23T10:00:00Z"
NAMESPACE = "default"


def make_graph(name="g", services=None, **spec):
    """Return a DynamoGraphDeployment; without services, one of a frontend and a worker."""
    services = {"Frontend": frontend(), "Decode": worker()} if services is None else services
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"services": services, **spec},
    }


def frontend(**fields):
    main = {"image": "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.4.1"}
    return {
        "componentType": "frontend",
        "replicas": 1,
        "extraPodSpec": {"mainContainer": main},
        **fields,
    }


def worker(flags="", replicas=1, **fields):
    main = {
        "image": "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.4.1",
        "command": ["/bin/sh", "-c"],
        "args": [f"python3 -m dynamo.vllm --model Qwen/Qwen3-0.6B {flags}".strip()],
    }
    return {
        "componentType": "worker",
        "replicas": replicas,
        "extraPodSpec": {"mainContainer": main},
        **fields,
    }


class DictCluster:
    """Objects by kind and name in one namespace, and what the controllers of a cluster make of them."""

    def __init__(self, settings=None, *, has_grove=False):
        self.settings = settings or OperatorConfig(etcd_addr="etcd:2379")
        self.has_grove = has_grove
        self.objects = {}
        self.pods = {}
        self.instances = None
        self.starts = {}
        self._with_replicas = set()  # Deployments whose replicas the operator sets
        self.num_writes = 0
        self._uids = itertools.count(1)
        self._tokens = itertools.count(1)

    def put(self, resource):
        """Create or replace an object as a user does; status and annotations are not kept."""
        key = resource["kind"], resource["metadata"]["name"]
        old = self.objects.get(key)
        stored = copy.deepcopy(resource)
        if resource["kind"] == "Deployment":
            self._keep_replicas(old, stored)
        metadata = stored["metadata"]
        if old is None:
            uid = next(self._uids)
            metadata |= {
                "uid": f"uid-{uid}",
                "creationTimestamp": f"2026-11-23T10:{uid // 60:02}:{uid % 60:02}Z",
            }
            metadata["generation"] = 1
        else:
            metadata |= {
                name: old["metadata"][name] for name in ("uid", "creationTimestamp", "generation")
            }
            metadata["generation"] += old.get("spec") != stored.get("spec")
            if "status" in old and "status" not in stored:
                stored["status"] = old["status"]
        metadata["resourceVersion"] = (old or stored)["metadata"].get("resourceVersion", "0")
        if stored != old:
            self.num_writes += 1
            metadata["resourceVersion"] = str(self.num_writes)
            self.objects[key] = stored
        return self.objects[key]

    def _keep_replicas(self, old, deployment):
        """Keep the replicas that an autoscaler set; what the operator itself no longer sets becomes the default."""
        name, spec = deployment["metadata"]["name"], deployment["spec"]
        is_set = "replicas" in spec
        if not is_set:
            spec["replicas"] = (
                1 if old is None or name in self._with_replicas else old["spec"]["replicas"]
            )
        (self._with_replicas.add if is_set else self._with_replicas.discard)(name)

    def get(self, kind, name):
        return self.objects.get((kind, name))

    def of_kind(self, kind):
        return [self.objects[key] for key in sorted(self.objects) if key[0] == kind]

    def delete(self, kind, name):
        self.num_writes += 1
        gone = self.objects.pop((kind, name), None)
        if gone:
            for key, item in list(self.objects.items()):
                owners = item["metadata"].get("ownerReferences") or []
                left = [o for o in owners if o["uid"] != gone["metadata"]["uid"]]
                if owners and not left:
                    self.delete(*key)
                elif left != owners:
                    item["metadata"]["ownerReferences"] = left
        if kind == "Deployment":
            self.pods = {n: p for n, p in self.pods.items() if p["deployment"] != name}

    def observe(self):
        return objects.Observed(
            now=NOW,
            objects=copy.deepcopy(self.objects),
            pods=[copy.deepcopy(entry["pod"]) for entry in self.pods.values()],
            instances=self.instances,
            starts=self.starts,
            has_grove=self.has_grove,
        )

    def actions(self, resource):
        """Return what one reconcile would do, as functions to call in order."""
        observed = self.observe()
        token = f"token-{next(self._tokens)}" * 4
        if resource["kind"] == "DynamoGraphDeployment":
            decision = graph.decide(resource, observed, self.settings, token)
        else:
            decision = component.decide(resource, observed, self.settings, token)
        for item in decision.create:
            key = item["kind"], item["metadata"]["name"]
            yield lambda item=item, key=key: key in self.objects or self.put(item)
        for item in decision.patch:
            yield lambda item=item: self.get(item["kind"], item["metadata"]["name"])[
                "metadata"
            ].update(ownerReferences=item["metadata"]["ownerReferences"])
        for item in decision.apply:
            yield lambda item=item: self.put(item)
        for reference in decision.delete:
            yield lambda reference=reference: self.delete(reference.kind, reference.name)
        yield lambda: self._write_status(resource, decision.status)

    def _write_status(self, resource, status):
        stored = self.get(resource["kind"], resource["metadata"]["name"])
        msgspec.json.encode(status)
        if stored is not None and stored.get("status") != status:
            self.num_writes += 1
            stored["status"] = status

    def reconcile(self, kind, name):
        resource = copy.deepcopy(self.get(kind, name))
        if resource is not None:
            for action in self.actions(resource):
                action()

    def run_controllers(self, becomes_ready=lambda pod: True):
        """Let each Deployment come one pod nearer to its spec, as one step; autoscalers enforce their limits."""
        for autoscaler in self.of_kind("HorizontalPodAutoscaler"):
            target = self.get("Deployment", autoscaler["spec"]["scaleTargetRef"]["name"])
            limits = autoscaler["spec"]["minReplicas"], autoscaler["spec"]["maxReplicas"]
            if target and target["spec"]["replicas"]:
                replicas = min(max(target["spec"]["replicas"], limits[0]), limits[1])
                self.put({**target, "spec": {**target["spec"], "replicas": replicas}})
                self._with_replicas.discard(target["metadata"]["name"])
        for deployment in self.of_kind("Deployment"):
            name = deployment["metadata"]["name"]
            spec = deployment["spec"]
            template = spec["template"]
            digits = template["metadata"]["labels"][objects.TEMPLATE_LABEL]
            mine = [e for e in self.pods.values() if e["deployment"] == name]
            stale = [e for e in mine if e["digits"] != digits]
            wanted = spec.get("replicas", 1)
            if len(mine) < wanted + (1 if stale else 0) and len(mine) - len(stale) < wanted:
                pod_name = f"{name}-{digits}-{next(self._uids)}"
                metadata = {"name": pod_name, "labels": template["metadata"]["labels"]}
                pod = {"metadata": metadata, "status": {"conditions": []}}
                self.pods[pod_name] = {"pod": pod, "deployment": name, "digits": digits}
            elif len(mine) > wanted:
                extra = (stale or mine)[-1]
                del self.pods[extra["pod"]["metadata"]["name"]]
            for entry in self.pods.values():
                if entry["deployment"] == name and becomes_ready(entry["pod"]):
                    entry["pod"]["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
            mine = [e["pod"] for e in self.pods.values() if e["deployment"] == name]
            ready = [p for p in mine if objects.find_condition(p, "Ready")]
            updated = [p for p in mine if p["metadata"]["labels"][objects.TEMPLATE_LABEL] == digits]
            deployment["status"] = {
                "observedGeneration": deployment["metadata"]["generation"],
                "replicas": len(mine),
                "updatedReplicas": len(updated),
                "readyReplicas": len(ready),
                "availableReplicas": len(ready),
            }

    def settle(self, most=60, **options):
        """Reconcile everything until nothing is written any more."""
        for _ in range(most):
            before = self.num_writes, len(self.pods)
            for kind in ("DynamoGraphDeployment", "DynamoComponentDeployment"):
                for resource in self.of_kind(kind):
                    self.reconcile(kind, resource["metadata"]["name"])
            self.run_controllers(**options)
            statuses = [d.get("status") for d in self.of_kind("Deployment")]
            if (self.num_writes, len(self.pods)) == before and statuses == getattr(
                self, "_statuses", None
            ):
                return
            self._statuses = statuses
        raise AssertionError(f"not settled after {most} rounds")

    def ready(self, name="g"):
        """Return the Ready condition of a graph."""
        return objects.find_condition(self.get("DynamoGraphDeployment", name), "Ready")
