"""Where a process finds the API of its cluster."""

import pytest

from dynamo.base import errors
from dynamo.runtime.backends.kubernetes import access, connection

CONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: c, user: u, namespace: ours}}]
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"}}]
"""
USERS = """
users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: echo}}}]
clusters: [{name: c, cluster: {server: "https://192.0.2.2:6443"}}]
"""


@pytest.fixture(autouse=True)
def no_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


async def test_kubeconfig_files_are_merged_and_the_first_holds(tmp_path):
    (tmp_path / "a").write_text(CONFIG)
    (tmp_path / "b").write_text(USERS)
    client, namespace = access.open_client({"KUBECONFIG": f"{tmp_path}/a:{tmp_path}/b"})

    assert str(client.base_url) == "https://192.0.2.1:6443"
    assert namespace == "ours"
    await client.aclose()


async def test_pod_uses_its_service_account(tmp_path, monkeypatch):
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    for name, content in (("token", "t"), ("namespace", "pods")):
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")

    with pytest.raises(errors.ConfigError, match="no Kubernetes cluster is configured"):
        access.open_client({})  # no ca.crt


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("[]", "not a kubeconfig"),
        ("{a: 1", "no Kubernetes cluster is configured: .*config: while parsing"),
        ("{}", "No current context"),
    ],
)
def test_wrong_kubeconfig_is_refused_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)

    with pytest.raises(errors.ConfigError, match=message) as refusal:
        access.open_client({"KUBECONFIG": str(path)})
    assert "set KUBECONFIG" in str(refusal.value)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-program", "no-such-program"),
        ("/bin/false", "Exec /bin/false returned 1"),
        ("echo", "JSON"),
    ],
)
async def test_program_that_gives_no_credentials_is_one_sentence(tmp_path, command, reason):
    """Also later: what it gave has ended, and a watch waits until it gives some again."""
    path = tmp_path / "config"
    path.write_text(CONFIG.rpartition("clusters:")[0] + USERS.replace("echo", command))
    message = f"no credentials for the cluster at https://192.0.2.2:6443: .*{reason}"
    async with connection.KubernetesConnection.open({"KUBECONFIG": str(path)}) as cluster:
        with pytest.raises(errors.Unavailable, match=message):
            await cluster.check()
