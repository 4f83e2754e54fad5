"""Makes what a Flower deployment with TLS and SuperNode authentication needs: a CA, a server certificate, node keys.

python scripts/flower/keys.py OUT --host superlink.example.org --nodes anna,ben,carla

Writes OUT/ca.crt and OUT/ca.key, OUT/server.crt and OUT/server.key, OUT/gateway.conf, and per node OUT/anna and
OUT/anna.pub (ECDSA on P-384 in OpenSSH's formats, as `flower-supernode` and `flwr supernode register` read them), and
OUT/peers with a line for each node, which privacy.secure needs at all of them; then prints the commands that come next.
A node gets ca.crt, peers and its own private key, and nothing else. Keep ca.key offline, or delete it: it is needed for
the next certificate only. In a real federation every site makes its own key pair (`ssh-keygen -t ecdsa -b 384 -N "" -f
anna`), sends in anna.pub, and gives it to the other sites without the server; give no --nodes then.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llm_fed.basics.errors import UserError

FILES = ("ca.crt", "ca.key", "server.crt", "server.key", "gateway.conf", "peers")
PEM, OPENSSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH


def make(folder: Path, host: str, nodes: Sequence[str], days: int = 365) -> None:
    """Write all files into `folder`; UserError if one of them is there already, and then nothing is written.

    Args:
        host: DNS name or IP address at which nodes reach the SuperLink; the certificate is valid for it and localhost.
        nodes: names of the nodes, one key pair each.
        days: how long the certificates are valid.
    """
    _refuse_bad_names(nodes)
    for file in [*FILES, *nodes, *(f"{node}.pub" for node in nodes)]:
        if (folder / file).exists():
            raise UserError(f"{folder / file} exists; keys are never overwritten: give another folder, or delete it")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    ca_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llm_fed CA")])
    ca = _signed(ca_name, ca_key, ca_name, ca_key, days, authority=True)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    server = _signed(name, key, ca_name, ca_key, days, hosts=[host, "localhost", "127.0.0.1"])

    _write_private(folder / "ca.key", _private(ca_key, serialization.PrivateFormat.PKCS8))
    (folder / "ca.crt").write_bytes(ca.public_bytes(PEM))
    _write_private(folder / "server.key", _private(key, serialization.PrivateFormat.PKCS8))
    (folder / "server.crt").write_bytes(server.public_bytes(PEM))
    gateway = (Path(__file__).parent / "gateway.conf").read_text()
    (folder / "gateway.conf").write_text(gateway.replace("KEYS", str(folder.resolve())))
    peers = []
    for node in nodes:
        node_key = ec.generate_private_key(ec.SECP384R1())
        _write_private(folder / node, _private(node_key, serialization.PrivateFormat.OpenSSH))
        public = node_key.public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{node}.pub").write_bytes(public + b"\n")
        peers.append(f"{node} {public.decode()}\n")
    (folder / "peers").write_text("".join(peers))


def next_steps(folder: Path, host: str, nodes: Sequence[str]) -> str:
    """The commands that start the deployment, in order, for people."""
    folder = folder.resolve()
    address = f"[{host}]:9092" if ":" in host else f"{host}:9092"
    return "\n".join(
        [
            "# 1. On the server. The SuperLink listens to this machine only; nginx lets the nodes in, and nobody else.",
            "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1",
            "flower-superlink --host 127.0.0.1 --port 8000 --enable-supernode-auth "
            f"--ssl-ca-certfile {folder}/ca.crt --ssl-certfile {folder}/server.crt --ssl-keyfile {folder}/server.key "
            f"--database {folder}/superlink.db --disable-runtime-dependency-installation",
            f"nginx -c {folder}/gateway.conf",
            "# 2. There, in ~/.flwr/config.toml:",
            f'[superlink.llm-fed]\naddress = "127.0.0.1:8000"\nroot-certificates = "{folder}/ca.crt"',
            "# 3. There, for each node:",
            *(f"flwr supernode register {folder}/{node}.pub llm-fed --name {node}" for node in nodes or ["NODE"]),
            "# 4. On each node, with ca.crt and its private key (several on one machine: each its own --port):",
            *(
                f"flower-supernode --superlink {address} --root-certificates {folder}/ca.crt "
                f"--auth-supernode-private-key {folder}/{node} --port 9094 "
                f"""--node-config 'home="FOLDER FOR MEMORIES" path="FOLDER WITH ITS DATA" clients="{node}"'"""
                for node in nodes or ["NODE"]
            ),
            "# With privacy.secure the words in --node-config have, too: "
            + f'key="{folder}/NODE" peers="{folder}/peers"',
            "# A node that is refused with 401 although it is registered: is its clock right?",
            f"curl -sI --cacert {folder}/ca.crt https://{address} | grep -i ^date; date -u",
            "# 5. On the server: flwr run APP llm-fed --stream",
        ]
    )


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
    authority: bool = False,
    hosts: Sequence[str] = (),
) -> x509.Certificate:
    """A certificate of `subject`, of a CA if `authority`, otherwise of a TLS server at `hosts`."""
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)  # clocks differ a little
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(_usage(authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if hosts:
        names = [_general_name(host) for host in dict.fromkeys(hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    return builder.sign(issuer_key, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    """A CA signs certificates, a server signs handshakes; nothing else."""
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(PEM, form, serialization.NoEncryption())


def _write_private(path: Path, data: bytes) -> None:
    """A new file that only its owner can read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _refuse_bad_names(nodes: Sequence[str]) -> None:
    for node in nodes:
        odd = not node or node != Path(node).name or node.startswith((".", "-")) or node.endswith(".pub")
        if odd or node in FILES:
            raise UserError(f"--nodes: {node!r} cannot be the name of a key file; give names such as anna,ben")
    if len(set(nodes)) < len(nodes):
        raise UserError(f"--nodes: a name is given twice in {','.join(nodes)}")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder; files in it are never overwritten")
    parser.add_argument("--host", required=True, help="DNS name or IP address at which nodes reach the SuperLink")
    parser.add_argument("--nodes", default="", help="names of SuperNodes to make key pairs for, e.g. anna,ben")
    parser.add_argument("--days", type=int, default=365, help="how long the certificates are valid (365)")
    given = parser.parse_args()
    nodes = [node for node in given.nodes.split(",") if node]
    try:
        make(given.out, given.host, nodes, given.days)
    except UserError as problem:
        parser.exit(2, f"keys.py: {problem}\n")
    print(next_steps(given.out, given.host, nodes))


if __name__ == "__main__":
    main()
