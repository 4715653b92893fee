"""`xray doctor`: each check of an installation yields what is wrong, in plain words, with its remedy.

The checks read, connect and measure; they start and change nothing, except for an empty file that is removed at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from xray.deployments.server_home import PORTS, ServerHome, check_free
from xray.deployments.servers import servers
from xray.tasks.output_directory import saved_config
from xray.tasks.preflight import check_ray_address
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import strip_credentials
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.gpus import has_driver
from xray_runtime.kernel.history.audit_check import read_log
from xray_runtime.kernel.history.graph import read_graph
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.trust.signing import exposed_keys

DISTRIBUTION = "xray-rlhf"
PYTHONS = ((3, 11), (3, 12), (3, 13))
MACHINES = ("x86_64", "aarch64")
MIN_DISK_GB, MIN_MEMORY_GB, MIN_SHARED_GB = 2.0, 2.0, 0.5
"""Enough for the smallest lifecycle (`configs/tiny.yaml`)."""
ANSWER_SECONDS = 5.0
MAX_SKEW_S = 120.0
EXTENSIONS = ("live", "ops", "studio")
"""Extras that single commands need."""
MODULES = ("deepspeed", "mlflow", "prefect", "ray", "vllm")

Environment = Mapping[str, str]


def diagnose(home: ServerHome, output: Path | None) -> dict[str, list[str]]:
    """Check → its problems."""
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "Python": check_python,
        "compiler": lambda: check_compiler(os.environ),
        "disk": lambda: check_disk(output, home.path),
        "memory": check_memory,
        "libraries": check_libraries,
        "GPU": lambda: check_gpu(has_driver()),
        "clock": lambda: check_clock(output, os.environ),
        "ports": lambda: check_ports(home),
        "servers": lambda: check_servers(os.environ),
    }
    if output is not None:
        checks["output"] = lambda: check_output(output)
    return {name: list(check()) for name, check in checks.items()}


def check_python() -> Iterator[str]:
    """Version of Python and kind of machine."""
    if sys.version_info[:2] not in PYTHONS:
        yield f"Python {platform.python_version()} is not supported: install X-ray into 3.11, 3.12 or 3.13"
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        yield f"{sys.platform} on {platform.machine()} is not supported: use Linux on {' or '.join(MACHINES)}"


def check_compiler(environment: Environment) -> Iterator[str]:
    """The C++ compiler, which DeepSpeed builds its optimizers with."""
    compiler = environment.get("CXX", "c++")
    if shutil.which(compiler) is None:
        yield f"the C++ compiler {compiler!r} is missing: install g++, or set CXX"


def check_disk(output: Path | None, home: Path | None = None) -> Iterator[str]:
    """Space for results, servers and temporary files, and whether they can be written."""
    try:
        temporary = [Path(tempfile.gettempdir())]
    except FileNotFoundError as error:
        yield f"no directory for temporary files can be written ({error.strerror}): free space, or set TMPDIR"
        temporary = []
    given = [_existing(path) for path in (output, home) if path is not None]
    for directory in dict.fromkeys([*temporary, *given]):
        free = shutil.disk_usage(directory).free / 1e9
        if free < MIN_DISK_GB:
            yield f"{free:.1f} GB are free in {directory}: {MIN_DISK_GB:g} GB are needed at least"
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            yield f"{directory} cannot be written ({error.strerror}): choose another with TMPDIR, --output or --home"


def check_memory() -> Iterator[str]:
    """Memory, and the shared memory of Ray's object store."""
    free = psutil.virtual_memory().available / 1e9
    if free < MIN_MEMORY_GB:
        yield f"{free:.1f} GB of memory are available: {MIN_MEMORY_GB:g} GB are needed; end other programs"
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free / 1e9) < MIN_SHARED_GB:
        yield f"{free:.2f} GB are free in {shared}, where Ray keeps objects: in a container, set --shm-size=2g"


def check_libraries(distribution: str = DISTRIBUTION) -> Iterator[str]:
    """Whether the installed versions are those that X-ray needs."""
    engines = {"cpu": list[str](), "cuda": list[str]()}
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        yield f"{distribution} is not installed in this Python ({sys.executable}): run `make install`"
        return
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _unmet(requirement)
            continue
        for extra, problems in engines.items():
            if requirement.marker.evaluate({"extra": extra}):
                problems += _unmet(requirement)
        # Extras are optional, but what is installed of one must have a fitting version.
        is_extension = any(requirement.marker.evaluate({"extra": extra}) for extra in EXTENSIONS)
        if is_extension and _is_installed(requirement.name):
            yield from _unmet(requirement)
    # One of the two is enough.
    if all(engines.values()):
        yield from min(engines.values(), key=len)
        return
    for name in MODULES:
        try:
            is_there = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            is_there = False
        if not is_there:
            yield f"{name} is listed as installed, and its files are missing: `make install` installs it again"


def _is_installed(name: str) -> bool:
    return next(iter(metadata.distributions(name=name)), None) is not None


def _unmet(requirement: Requirement) -> Iterator[str]:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        yield f"{requirement.name} is not installed: install {requirement.name}{requirement.specifier}"
        return
    # A build such as 2.13.0+cpu is that version.
    if not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
        needed = f"{requirement.name}{requirement.specifier}"
        yield f"{requirement.name} {version} is installed: {needed} is needed; `make install` installs it"


def check_gpu(has_driver: bool) -> Iterator[str]:
    """Whether torch loads, and can use the GPU that this machine's driver offers."""
    try:
        import torch
    # A library that it needs is missing (OSError), or torch is installed only in part.
    except (ImportError, OSError, AttributeError) as error:
        yield f"torch does not load ({first_line(error)}): run `make install`"
        return
    built = torch.version.cuda
    if has_driver and built is None:
        yield "there is a GPU, and torch is built for CPUs: run `make install EXTRA=cuda`"
    elif has_driver and not torch.cuda.is_available():
        yield f"torch is built for CUDA {built}, which the driver here cannot run: update the driver ({_driver()})"
    elif built is not None and not has_driver and not torch.cuda.is_available():
        yield (
            f"torch is built for CUDA {built}, and there is no driver: install it, give the container its GPUs, or run "
            "`make install` for CPUs"
        )


def check_clock(output: Path | None, environment: Environment) -> Iterator[str]:
    """This machine's clock against the signed log and the servers: keys, tokens and schedules rely on it."""
    now = time.time()
    if output is not None and (output / CHECKPOINTS).is_dir():
        times = [run.at for run in view(output).runs.values()] + [d.at for d in view(output).decisions]
        last = max((datetime.fromisoformat(at).timestamp() for at in times if at), default=0.0)
        if last > now + MAX_SKEW_S:
            yield f"the last entry of the log was written {_duration(last - now)} from now: set this machine's clock"
    for variable, address in _http_servers(environment).items():
        if theirs := _date(f"{address.rstrip('/')}/health"):
            skew = theirs - time.time()
            if abs(skew) > MAX_SKEW_S:
                side = "behind" if skew > 0 else "ahead of"
                yield f"this machine's clock is {_duration(abs(skew))} {side} that of {variable}: set one of them"


def _http_servers(environment: Environment) -> dict[str, str]:
    """Variable → the address of a server that it names, without a login."""
    named = {variable: environment.get(variable, "") for variable in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL")}
    return {name: strip_credentials(uri) for name, uri in named.items() if urlsplit(uri).scheme in ("http", "https")}


def _date(address: str) -> float | None:
    """The time that a server sends with its answers, in seconds since 1970; None where it sends none."""
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as reply:
            sent = reply.headers.get("date")
    except urllib.error.HTTPError as error:
        sent = error.headers.get("date")
    # `check_servers` says that it does not answer.
    except (OSError, ValueError):
        return None
    try:
        return parsedate_to_datetime(sent).timestamp() if sent else None
    except ValueError:
        return None


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    return "its version is unknown"


def check_ports(home: ServerHome) -> Iterator[str]:
    """Ports that `xray up` needs and another program has."""
    state = home.load() if home.path.is_dir() else None
    up = {service.name for service in servers(home, state) if service.find()} if state is not None else set()
    ports = state.ports if state is not None else PORTS
    for name, port in ports.items():
        if name in up or (name == "dashboard" and "ray" in up):
            continue
        try:
            check_free("127.0.0.1", f"--{name}-port", port)
        except ConfigError:
            yield f"another program has port {port}, which `xray up` gives {name}: choose one with --{name}-port"


def check_servers(environment: Environment) -> Iterator[str]:
    """Whether the servers that the environment names answer."""
    try:
        check_ray_address(environment)
    except ConfigError as error:
        yield str(error)
        return
    if (address := environment.get("RAY_ADDRESS", "")) not in ("", "auto", "local"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        except (OSError, ValueError) as error:
            yield f"RAY_ADDRESS: {address!r} does not answer ({error}): start that cluster, or unset it"
    for variable, shown in _http_servers(environment).items():
        try:
            urllib.request.urlopen(f"{shown.rstrip('/')}/health", timeout=ANSWER_SECONDS).close()
        except urllib.error.HTTPError as error:
            # A server that asks for a password is there.
            if error.code not in (401, 403):
                yield f"{variable}: {shown!r} answers with status {error.code}: is it the right address?"
        except (OSError, ValueError) as error:
            yield f"{variable}: {shown!r} does not answer ({error}): start that server, or unset it"


def check_output(output: Path) -> Iterator[str]:
    """Whether an output directory is damaged or incomplete; `xray audit --all` reads every byte of it."""
    if not output.exists():
        return
    if not output.is_dir():
        yield f"{output} is a file: name a directory"
        return
    if not (output / CHECKPOINTS).is_dir():
        if any(output.iterdir()):
            yield f"{output} holds files, and no {CHECKPOINTS}/: no run has published here; is it the right directory?"
        return
    yield from exposed_keys(output)
    for directory, reason in read_graph(output / CHECKPOINTS).unreadable.items():
        yield f"{directory.name} is damaged ({reason}): move it away and run again; it is computed anew"
    for finding in read_log(output, None)[1]:
        yield f"{finding.subject}: {finding.detail}: see `xray audit --all --output {output}`"
    for run in view(output).open_runs(output):
        yield f"run {run[:12]} is in progress, or was interrupted: repeat its command to finish it"
    try:
        saved_config(output)
    except ConfigError as error:
        yield str(error)
    if (database := output / "mlflow.db").is_file():
        try:
            with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                [(result,)] = connection.execute("pragma quick_check(1)").fetchall()
        except sqlite3.Error as error:
            result = str(error)
        if result != "ok":
            yield f"{database} is damaged ({result}): restore it from a copy"


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next(directory for directory in (path.absolute(), *path.absolute().parents) if directory.is_dir())
