"""The options of the operator; those of NVIDIA Dynamo's keep their spelling."""

from dataclasses import dataclass
from typing import Literal

from dynamo.base import config, distribution, errors

# The vendor's run-time images and ours. On a cluster theirs would run the vendor's code; the host is not looked at.
IMAGES = {
    "nvidia/ai-dynamo/vllm-runtime": "dynamo-serving/vllm-runtime",
    "nvidia/ai-dynamo/sglang-runtime": "dynamo-serving/sglang-runtime",
    "nvidia/ai-dynamo/tensorrtllm-runtime": "dynamo-serving/trtllm-runtime",
    "nvidia/ai-dynamo/dynamo-frontend": "dynamo-serving/frontend",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Turn DynamoGraphDeployments into Deployments, Services and their like."""

    nats_addr: str = config.option(
        "", flag="--natsAddr", help="NATS that pods get as NATS_SERVER; empty: none"
    )
    etcd_addr: str = config.option(
        "", flag="--etcdAddr", help="etcd that pods get as ETCD_ENDPOINTS; empty: none"
    )
    discovery_backend: Literal["auto", "etcd", "kubernetes"] = config.option(
        "auto", help="how pods find each other; auto: by etcd where --etcdAddr is given"
    )
    restricted_namespace: str = config.option(
        "",
        flag="--restrictedNamespace",
        help="namespace to which the operator keeps itself; empty: all, which needs rights in the whole cluster",
    )
    image_table: tuple[str, ...] = config.option(
        (),
        help="images to use in place of others, as FROM=TO without tag or host of FROM; they go beyond the built-in"
        " table of the vendor's images; FROM= leaves that image alone",
    )
    image_tag: str = config.option(
        "", help="tag of images that the table replaces; empty: the version of this operator"
    )
    istio_virtual_service_gateway: str = config.option(
        "", help="gateway of the VirtualServices, where a service asks for one"
    )
    ingress_controller_class_name: str = config.option("", help="class of the Ingresses")
    ingress_controller_tls_secret_name: str = config.option(
        "", help="Secret with the certificate of the Ingresses"
    )
    ingress_host_suffix: str = config.option("", help="domain of Ingresses that name no host")
    enable_lws: bool = config.option(
        False,
        help="make LeaderWorkerSets for multinode services where Grove is not; their controller must be there",
    )
    grove_termination_delay: str = config.option(
        "15m", help="how long Grove lets a gang of pods lack members before it starts the gang anew"
    )
    restricted_security_context: bool = config.option(
        False, help="run all containers as pod security level `restricted` demands"
    )
    leader_elect: bool = config.option(True, help="act only while holding a Lease")
    lease_namespace: str = config.option(
        "",
        help="namespace of the Lease of --leader-elect; empty: that of --restrictedNamespace, or the operator's own",
    )
    metrics_bind_address: str = config.option("127.0.0.1:8080", help="address of /metrics")
    health_probe_bind_address: str = config.option(
        "127.0.0.1:8081", help="address of /healthz and /readyz"
    )
    webhook_bind_address: str = config.option(
        "0",
        help="address of the webhooks that check DynamoGraphDeployments and convert v1beta1, for which it needs"
        " rights in the whole cluster; 0: none, and v1beta1 is not served",
    )
    webhook_service: str = config.option(
        "",
        help="NAMESPACE/NAME of the Service by which the API server reaches the webhooks, at port 443; empty: at their"
        " own address",
    )
    webhook_name: str = config.option(
        "dynamo-operator",
        help="name of the webhook configurations, and of the Secret of their certificate, before -webhook-certificate",
    )
    webhook_certificate_dir: str = config.option(
        "",
        help="folder with tls.crt, tls.key and ca.crt, such as cert-manager's Secret; empty: the operator makes and"
        " renews a certificate",
    )
    remove_webhooks: bool = config.option(
        False,
        help="only have v1beta1 served no longer, and end: after an uninstallation nothing converts it",
    )
    resync_s: float = config.option(
        600.0, help="seconds after which every object is looked at again", least=1
    )

    @property
    def used_discovery(self) -> str:
        """Return the discovery backend of the pods: etcd or kubernetes."""
        if self.discovery_backend != "auto":
            return self.discovery_backend
        return "etcd" if self.etcd_addr else "kubernetes"

    def check(self) -> None:
        """Raise ConfigError for options that cannot be read, or that would have no effect."""
        self.substitute_image("")
        namespace, _, name = self.webhook_service.partition("/")
        if self.webhook_service and not (namespace and name):
            raise errors.ConfigError(
                f"--webhook-service {self.webhook_service}: expected NAMESPACE/NAME"
            )
        for flag, value in (
            ("--webhook-service", self.webhook_service),
            ("--webhook-certificate-dir", self.webhook_certificate_dir),
        ):
            if value and self.webhook_bind_address == "0" and not self.remove_webhooks:
                raise errors.ConfigError(f"{flag}: has no effect without --webhook-bind-address")

    def substitute_image(self, image: str) -> str:
        """Return the image that runs in place of this one. Raises ConfigError for a table that cannot be read."""
        table = dict(IMAGES)
        for entry in self.image_table:
            name, sign, substitute = entry.partition("=")
            if not sign or not name:
                raise errors.ConfigError(f"--image-table {entry}: expected FROM=TO")
            table[name] = substitute
        path, _, last = image.partition("@")[0].rpartition("/")
        name = f"{path}/{last.partition(':')[0]}".lstrip("/")
        for original, substitute in table.items():
            if substitute and (name == original or name.endswith(f"/{original}")):
                has_tag = ":" in substitute.rpartition("/")[2]
                tag = self.image_tag or distribution.version()
                return substitute if has_tag else f"{substitute}:{tag}"
        return image


def parse_address(address: str, flag: str) -> tuple[str, int]:
    """Return host and port of an address such as :8081 or 127.0.0.1:8080. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise errors.ConfigError(f"{flag} {address}: expected HOST:PORT or :PORT")
    return host.strip("[]") or "0.0.0.0", int(port)
