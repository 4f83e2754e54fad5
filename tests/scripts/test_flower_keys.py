"""scripts/flower/keys.py: what it writes, who may read it, and that it never overwrites."""

import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flower_deployment import keys

from llm_fed.basics.errors import UserError
from llm_fed.network import peers


@pytest.fixture
def folder(tmp_path):
    keys.make(tmp_path / "keys", "fed.example.org", ["anna", "ben"])
    return tmp_path / "keys"


def test_private_files_can_be_read_by_their_owner_only(folder):
    private = {"ca.key", "server.key", "anna", "ben"}
    assert {path.name for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) == 0o600} == private
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_certificate_is_valid_for_the_host_and_this_machine_and_comes_from_the_ca(folder):
    ca, server = (x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    ssl.create_default_context(cafile=folder / "ca.crt")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "server.crt", folder / "server.key")


def test_each_node_has_a_key_pair_of_its_own(folder):
    public = {}
    for node in ("anna", "ben"):
        key = load_ssh_private_key((folder / node).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)
        public[node] = load_ssh_public_key((folder / f"{node}.pub").read_bytes())
        assert public[node] == key.public_key()
    assert public["anna"] != public["ben"] and peers.read(str(folder / "peers")) == public


def test_no_key_is_overwritten_and_then_nothing_is_written(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        if path.name not in ("ben", "ben.pub"):
            path.unlink()
    with pytest.raises(UserError, match="ben exists; keys are never overwritten"):
        keys.make(folder, "fed.example.org", ["anna", "ben"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: before[name] for name in ("ben", "ben.pub")
    }


@pytest.mark.parametrize(
    "nodes", [["../anna"], ["ca.key"], [".ssh"], ["-f"], ["anna", "anna.pub"], ["ben", "ben"], [""]]
)
def test_names_that_are_no_file_names_are_refused(tmp_path, nodes):
    with pytest.raises(UserError, match="--nodes"):
        keys.make(tmp_path / "keys", "localhost", nodes)
    assert not (tmp_path / "keys").exists()
