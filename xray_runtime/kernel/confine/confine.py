"""Confines a program as well as this machine can.

bubblewrap   a file system of its own with a limited disk, processes and a network of its own, no rights
namespaces   the same without bubblewrap, where users may make namespaces
landlock     files, TCP ports and signals by Landlock, without a limit of the disk; it can ask whether a file exists
limits       only limits of time, memory, output and processes, and no variables of ours

In all of them a program may only use the system calls of a list (`seccomp`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import xray_runtime
from xray_runtime.kernel.confine import inside, landlock
from xray_runtime.kernel.processes import TAG

log = logging.getLogger(__name__)

Confinement = Literal["bubblewrap", "namespaces", "landlock", "limits"]
OWN_ROOM: tuple[Confinement, ...] = ("bubblewrap", "namespaces")
"""Ways to keep programs in: they have files, processes and a network of their own."""

BUBBLEWRAP = "bwrap"
TRY_S = 30.0
ORDER: tuple[Confinement, ...] = ("bubblewrap", "namespaces", "landlock", "limits")
CONFIGURATION = """alternatives ca-certificates.conf crypto-policies group host.conf hosts ld.so.cache ld.so.conf
ld.so.conf.d localtime mime.types nsswitch.conf passwd pki protocols services ssl"""
"""Names in /etc that programs need and anybody may know."""
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", *(f"/etc/{name}" for name in CONFIGURATION.split())]
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
HOME, FILES = "/tmp/home", "/files"
ISOLATED = """--unshare-all --unshare-user --disable-userns --uid 65534 --gid 65534 --cap-drop ALL --hostname sandbox
--proc /proc --remount-ro /proc --dev /dev"""
"""Namespaces of its own, as an unprivileged user without capabilities. Root could write to the kernel's settings."""
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", TAG)
"""Variables of ours that a program keeps. With the run's tag it ends with the run."""
COUNTS_BY_NAMESPACE = (5, 14)
"""Linux since which a sandbox's processes are counted apart from the user's others."""
DOOR = 3
"""Descriptor for connections to the gateway."""
EXTRA_PROCESSES = {"bubblewrap": 3, "namespaces": 3, "landlock": 0, "limits": 0}
"""Confinement → processes besides the program's own: the first outside and inside, and the gateway's inside."""


@dataclass(frozen=True)
class View:
    """The files, addresses and resources that a program can reach."""

    home: Path
    """Its directory outside bubblewrap, which no one else uses."""
    readable: Sequence[Path] = ()
    files: Path | None = None
    """Copied to its directory."""
    gateway: str | None = None
    disk_mb: int = 64
    processes: int | None = None
    """Limit that the kernel holds in a namespace, unless it is root who starts it."""
    with_parent: bool = True
    """It ends with the thread that starts it."""
    filters_itself: bool = False
    """The program limits the system calls of what it starts, more than this would."""


@cache
def confinement() -> Confinement:
    """The first kind of confinement that works here. Logs once what is missing for a kind of `OWN_ROOM`."""
    missing = []
    for how in ORDER:
        why = _why_not(how)
        if why is None:
            break
        missing.append(f"{how}: {why}")
    if how not in OWN_ROOM:
        log.warning("no sandbox on this machine confines programs (%s)", "; ".join(missing))
    return how


def check_kept_in(how: Confinement, accepts_weak: bool) -> None:
    """Raises ValueError if programs may not be confined by `how` alone."""
    if how in OWN_ROOM or accepts_weak:
        return
    left = {
        "landlock": "Landlock alone would let an agent see which files exist",
        "limits": "an agent could read and change your files",
    }[how]
    raise ValueError(
        "environment.accept_weak_sandbox = false is not allowed on this machine: neither bubblewrap nor user "
        f"namespaces work ({_why_not('namespaces')}), and {left}; install bubblewrap, let users make namespaces, name "
        "a service in environment.sandbox, or set environment.accept_weak_sandbox to true"
    )


def confined(command: Sequence[str], view: View, how: Confinement) -> list[str]:
    """The command that runs `command` confined, in `view.home`. It keeps open descriptors."""
    port = None if view.gateway is None else urlsplit(view.gateway).port
    readable = [*SYSTEM, *map(str, (*_python(), *view.readable))]
    spec: dict[str, Any] = {"files": None if view.files is None else str(view.files), "home": str(view.home)}
    spec |= {"door": DOOR, "port": port, "how": how, "root": str(_root()), "filter": not view.filters_itself}
    start = [sys.executable, "-I", "-S", inside.__file__]
    if how not in OWN_ROOM:
        spec |= {"readable": [*readable, *DEVICES], "writable": [str(view.home), "/dev/null"]}
        return [*start, json.dumps(spec), *command]
    files = {} if view.files is None else {str(view.files): FILES}
    spec |= {"files": None if view.files is None else FILES, "home": HOME}
    if view.processes is not None and os.geteuid() != 0 and _kernel() >= COUNTS_BY_NAMESPACE:
        spec["processes"] = view.processes + EXTRA_PROCESSES[how]
    if how == "bubblewrap":
        binds = [part for pair in files.items() for part in ("--ro-bind", *pair)]
        return [*_bubblewrap(readable, binds, view), *start, json.dumps(spec), *command]
    pairs = [*((path, path) for path in map(os.path.normpath, readable)), *files.items()]
    spec |= {"new_root": str(view.home), "readable": pairs, "devices": DEVICES, "disk_mb": view.disk_mb}
    return [*start, json.dumps(spec), *command]


def plain_environment(home: Path, how: Confinement) -> dict[str, str]:
    """The variables of a confined program."""
    directory = HOME if how in OWN_ROOM else str(home)
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return (
        {"PATH": os.defpath}
        | variables
        | {"HOME": directory, "TMPDIR": directory, "USER": "nobody", "LOGNAME": "nobody"}
    )


def venv_paths(venv: Path) -> list[Path]:
    """The paths that a virtual environment needs: its directory, and programs and libraries of its Python."""
    paths = [venv.absolute()]
    for home in {(venv / "bin" / "python").resolve().parent, *_homes(venv / "pyvenv.cfg")}:
        if home.name == "bin":
            paths += _of_prefix(home.parent)
    return paths


def _homes(settings: Path) -> Iterable[Path]:
    if settings.is_file():
        for line in settings.read_text().splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "home":
                yield Path(value.strip())


def _of_prefix(prefix: Path) -> list[Path]:
    return [prefix / name for name in ("bin", "lib", "lib64", "include") if (prefix / name).exists()]


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def _root() -> Path:
    return Path(xray_runtime.__file__).parents[1]


def _python() -> list[Path]:
    """Our Python, and the code that runs inside."""
    is_venv = sys.prefix != sys.base_prefix
    prefix = [Path(sys.prefix)] if is_venv else _of_prefix(Path(sys.prefix))
    paths = [*prefix, *_of_prefix(Path(sys.base_prefix)), Path(sysconfig.get_path("stdlib"))]
    own = Path(__file__).parent
    above = [folder / "__init__.py" for folder in own.parents if folder.is_relative_to(_root() / "xray_runtime")]
    return [*paths, Path(sys.executable).resolve().parent, *above, own]


def _bubblewrap(readable: Sequence[str], files: Sequence[str], view: View) -> list[str]:
    size = str(view.disk_mb * 2**20)
    command = [
        shutil.which(BUBBLEWRAP) or BUBBLEWRAP,
        *ISOLATED.split(),
        *("--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", size, "--tmpfs", "/tmp", "--dir", HOME),
        *(["--die-with-parent"] if view.with_parent else []),
    ]
    for path in dict.fromkeys(readable):
        command += ["--ro-bind-try", path, path]
    return [*command, *files, "--remount-ro", "/", "--chdir", HOME, "--"]


def _why_not(how: Confinement) -> str | None:
    """Why programs cannot be confined by `how` here; None if they can."""
    if how == "limits":
        return None
    if how == "bubblewrap" and shutil.which(BUBBLEWRAP) is None:
        return "it is not installed"
    if how == "landlock" and landlock.version() < landlock.NEEDED_VERSION:
        return f"Linux has version {landlock.version()}, and {landlock.NEEDED_VERSION} is needed"
    environment = {"PATH": os.environ.get("PATH", os.defpath)}
    with tempfile.TemporaryDirectory(prefix="xray-try-") as directory:
        command = confined([sys.executable, "-I", "-S", "-c", ""], View(Path(directory)), how)
        try:
            done = subprocess.run(
                command, cwd=directory, capture_output=True, env=environment, timeout=TRY_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return " ".join(str(error).split())
    if not done.returncode:
        return None
    lines = done.stderr.decode(errors="replace").split("\n")
    return next(
        (" ".join(line.split())[-200:] for line in reversed(lines) if line.strip()), f"it ends with {done.returncode}"
    )
