"""Who may join a deployment: real processes of Flower on 127.0.0.1, with the keys that scripts/flower/keys.py makes."""

import os
import shutil
from pathlib import Path

import pytest
from flower_deployment import Deployment, free_port, keys

pytestmark = pytest.mark.slow
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """One SuperLink and one registered node, and beside them the keys of another deployment."""
    folder = tmp_path_factory.mktemp("flower")
    keys.make(folder / "foreign", "127.0.0.1", ["mallory"])
    with Deployment(folder / "deployment", {"anna": {"client": "anna"}}) as running:
        yield running


@pytest.fixture
def foreign(deployment) -> Path:
    return deployment.folder.parent / "foreign"


def refused(deployment: Deployment, place: str, *words: str) -> str:
    """What a SuperNode says that gives up at its first failure; it must end by itself, with an error, without an id."""
    command = ["flower-supernode", "--superlink", deployment.address, "--port", str(free_port()), "--max-retries", "0"]
    assert deployment.launch(place, [*command, *words]).wait(timeout=60) == 1
    said = deployment.log(place, new=True)
    assert "Exit Code: 305" in said and "Failed to initialize the connection to the SuperLink" in said, said
    assert "SuperNode ID" not in said
    return said


def online(deployment: Deployment) -> set[int]:
    nodes = deployment.flwr("supernode", "list", "llm-fed")["nodes"]
    return {int(node["node-id"]) for node in nodes if node["status"] == "online"}


def test_a_registered_node_is_accepted(deployment):
    """Without this, refusals prove nothing."""
    assert f"SuperNode ID: {deployment.node_ids['anna']}" in deployment.log("anna")
    assert online(deployment) == {deployment.node_ids["anna"]}


def test_a_key_that_is_not_registered_is_refused(deployment, foreign):
    trusted = ["--root-certificates", f"{deployment.folder}/keys/ca.crt"]
    said = refused(deployment, "mallory", *trusted, "--auth-supernode-private-key", f"{foreign}/mallory")
    assert "[code: 2004] Failed to activate SuperNode" in said
    assert "No SuperNode found with the given public key" in deployment.log("superlink")
    assert online(deployment) == {deployment.node_ids["anna"]}


def test_a_node_without_a_key_is_refused(deployment):
    said = refused(deployment, "nobody", "--root-certificates", f"{deployment.folder}/keys/ca.crt")
    assert "SuperNode authentication is enabled. All SuperNodes must be registered" in said


def test_a_node_refuses_a_superlink_whose_certificate_is_of_another_ca(deployment, foreign):
    """Whoever poses as the SuperLink learns nothing, with a registered node's key as little as without."""
    mine = ["--auth-supernode-private-key", f"{deployment.folder}/keys/anna"]
    said = refused(deployment, "deceived", *mine, "--root-certificates", f"{foreign}/ca.crt")
    assert "SSL/TLS handshake error" in said and "CERTIFICATE_VERIFY_FAILED" in said


def test_plain_http_is_refused(deployment):
    before = deployment.log("superlink").count("activate-node")
    said = refused(deployment, "plain", "--insecure")
    assert "Server disconnected without sending a response" in said
    assert deployment.log("superlink").count("activate-node") == before


@pytest.mark.skipif(NGINX is None, reason="needs nginx")
def test_the_gateway_lets_nodes_through_and_nothing_else(deployment):
    """scripts/flower/gateway.conf with other ports. The SuperLink itself answers anybody: with a node's certificates
    and no other key, `flwr` lists the nodes where the gateway refuses it."""
    port, folder = free_port(), deployment.folder / "gateway"
    folder.mkdir()
    text = (deployment.folder / "keys" / "gateway.conf").read_text()
    text = text.replace("listen 9092", f"listen 127.0.0.1:{port}").replace("127.0.0.1:8000", deployment.address)
    (folder / "gateway.conf").write_text(text)
    one_process = f"daemon off; master_process off; pid {folder}/pid; error_log stderr;"
    deployment.launch("gateway", [str(NGINX), "-p", str(folder), "-c", "gateway.conf", "-g", one_process])
    (anna,) = deployment.processes("anna", "flower-supernode")
    anna.terminate()  # it says good-bye, so that it may come back at once
    anna.wait(30)
    through = [word.replace(deployment.address, f"127.0.0.1:{port}") for word in deployment.supernode("anna")]
    deployment.start_node("anna", through)
    assert online(deployment) == {deployment.node_ids["anna"]}

    home = deployment.folder / "cli" / "flwr" / "config.toml"
    direct = home.read_text()
    home.write_text(direct.replace(deployment.address, f"127.0.0.1:{port}"))
    try:
        with pytest.raises(RuntimeError, match="403 Forbidden"):
            online(deployment)
    finally:
        home.write_text(direct)
