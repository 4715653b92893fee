"""A timestamp authority (RFC 3161) on this machine, by `openssl ts`."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CONFIG = """
[tsa]
default_tsa = tsa_config
[tsa_config]
serial = {folder}/serial
crypto_device = builtin
signer_cert = {folder}/tsa.pem
signer_key = {folder}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
ess_cert_id_alg = sha256
"""


@dataclass
class Authority:
    address: str
    root: str
    """Its root certificate, in PEM."""
    certificate: Path
    """The certificate that it stamps with."""


@contextmanager
def authority(folder: Path) -> Iterator[Authority]:
    """A server that stamps until the block ends."""
    folder.mkdir()
    root = _certificates(folder)
    (folder / "serial").write_text("01")
    (folder / "ts.cnf").write_text(CONFIG.format(folder=folder))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            (folder / "query").write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            command = ["openssl", "ts", "-reply", "-config", "ts.cnf", "-queryfile", "query", "-out", "reply"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            self.send_response(200)
            self.end_headers()
            self.wfile.write((folder / "reply").read_bytes())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Authority(f"http://127.0.0.1:{server.server_port}", root, folder / "tsa.pem")
    finally:
        server.shutdown()
        server.server_close()


def _certificates(folder: Path) -> str:
    """Write the key and certificate that stamp; returns the root certificate."""
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{folder.name} {part}")]) for part in ("root", "tsa")]
    now = datetime.now(UTC)

    def certificate(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(names[0]).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        return builder.not_valid_after(now + timedelta(days=1))

    constraints = x509.BasicConstraints(ca=True, path_length=None)
    root = certificate(names[0], root_key.public_key()).add_extension(constraints, critical=True)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
    stamps = certificate(names[1], key.public_key()).add_extension(usage, critical=True)
    pem = serialization.Encoding.PEM
    (folder / "tsa.pem").write_bytes(stamps.sign(root_key, hashes.SHA256()).public_bytes(pem))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "tsa.key").write_bytes(key.private_bytes(pem, form, plain))
    return root.sign(root_key, hashes.SHA256()).public_bytes(pem).decode()
