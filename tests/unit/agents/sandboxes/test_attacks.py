"""Attacks of sandboxed programs on files, processes and networks outside. Each one works without a sandbox."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.sandboxes.attacks import CHANGES, COLUMN, HELPERS, KEY, LANDLOCK_ALLOWS, LEARNS, NUMBERS, SECRET
from xray_runtime.agents.local_sandbox import LocalSandbox
from xray_runtime.agents.sandboxes.base import Box, Limits, Program
from xray_runtime.kernel.confine import confine

HAS = {how: confine._why_not(how) is None for how in ("bubblewrap", "namespaces", "landlock")}
MIN_CHANGING, MIN_WORKING = (45, 40) if os.geteuid() == 0 else (25, 25)
"""Attacks of `CHANGES` and `LEARNS` that work on any Linux without a sandbox."""

VICTIM = f"""
import ctypes, os, sys
secret = ctypes.create_string_buffer({SECRET!r}.encode())
file = os.open(sys.argv[1], os.O_RDONLY)
print(ctypes.addressof(secret), file, flush=True)
sys.stdin.read()
"""


@dataclass
class Victim:
    """Files that must not change, and must not be known."""

    file: Path
    process: subprocess.Popen[str]
    address: int
    fd: int
    sockets: list[socket.socket]

    def state(self) -> dict[str, Any]:
        pid, directory = self.process.pid, self.file.parent
        found: dict[str, Any] = {"names": sorted(os.listdir(directory)), "directory": os.stat(directory).st_mode}
        found["attributes"] = os.listxattr(directory)
        if self.file.exists():
            status = self.file.stat()
            found["file"] = (status.st_mode, status.st_mtime, status.st_uid, self.file.read_text())
            found["kept"] = os.listxattr(self.file)
            found["flags"] = _flags(self.file)
        found["code"] = self.process.poll()
        if found["code"] is None:
            found["process"] = (
                resource.prlimit(pid, resource.RLIMIT_NOFILE),
                os.getpriority(os.PRIO_PROCESS, pid),
                os.sched_getaffinity(pid),
                os.sched_getscheduler(pid),
                _call("ioprio_get", 1, pid),
                Path(f"/proc/{pid}/oom_score_adj").read_text(),
                "T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3],
                _memory(pid, self.address),
            )
        found["objects"] = [_call("shmget", KEY, 0, 0), _call("msgget", KEY, 0), _call("semget", KEY, 0, 0)]
        found["objects"] = [number >= 0 for number in found["objects"]] + [_call("mq_open", _name(), 0, 0, None) >= 0]
        found["settings"] = Path("/proc/sys/kernel/printk_delay").read_text()
        found["reached"] = [_is_reached(one) for one in self.sockets]
        return found


def _name() -> bytes:
    return f"xray-{KEY}".encode()


def _call(name: str, *arguments: Any) -> int:
    number = NUMBERS[name][COLUMN]
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


def _flags(path: Path) -> bytes:
    import fcntl

    with path.open() as file:
        try:
            return fcntl.ioctl(file, 0x80086601, bytes(8))
        except OSError:
            return b""


def _memory(pid: int, address: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", 0) as file:
        file.seek(address)
        return file.read(20)


def _is_reached(one: socket.socket) -> bool:
    try:
        one.recv(1) if one.type == socket.SOCK_DGRAM else one.accept()[0].close()
    except OSError:
        return False
    return True


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    with _attacked(tmp_path / "keys") as found:
        yield found


@contextmanager
def _attacked(directory: Path) -> Iterator[Victim]:
    directory.mkdir()
    directory.chmod(0o755)
    file = directory / "signing.pem"
    file.write_text("PRIVATE".ljust(777))
    file.chmod(0o600)
    os.setxattr(file, "user.kept", b"kept-value")
    os.utime(file, (1e9, 1e9))
    (directory / "hint").symlink_to("the-target")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", VICTIM, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"TOKEN": SECRET},
        process_group=0,
    )
    assert process.stdout is not None
    address, fd = map(int, process.stdout.readline().split())
    sockets = [socket.create_server(("127.0.0.1", 0))]
    port = sockets[0].getsockname()[1]
    sockets += [socket.socket(2, 2), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    sockets[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 5)
    for one, name in zip(sockets[1:], (("127.0.0.1", port), str(directory / "unix"), f"\0xray-{port}"), strict=True):
        one.bind(name)
        one.type == socket.SOCK_DGRAM or one.listen()
    for one in sockets:
        one.setblocking(False)
    settings = Path("/proc/sys/kernel/printk_delay")
    before = settings.read_text()
    yield Victim(file, process, address, fd, sockets)
    if settings.read_text() != before:
        settings.write_text(before)
    for one in sockets:
        one.close()
    process.kill()
    process.communicate()
    for name, remove in (("shmget", 31), ("msgget", 71), ("semget", 66)):
        if COLUMN == 0 and (number := _call(name, KEY, 0, 0)) >= 0:
            ctypes.CDLL(None).syscall(remove, number, 0, 0) if name != "semget" else ctypes.CDLL(None).semctl(
                number, 0, 0
            )
    ctypes.CDLL(None).mq_unlink(b"/" + _name())


@pytest.fixture(scope="module", params=HAS)
def sandbox(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSandbox]:
    if not HAS[request.param]:
        pytest.skip(f"this machine has no {request.param}")
    found = LocalSandbox(tmp_path_factory.mktemp("log") / "agents.log", request.param, accepts_weak=True)
    yield found
    found.close()


def _source(victim: Victim, *attacks: str) -> str:
    """A program that makes attacks one after another, each in a process of its own."""
    names = {"F": str(victim.file), "D": str(victim.file.parent), "P": victim.process.pid, "A": victim.address}
    names |= {"FD": victim.fd, "PORT": victim.sockets[0].getsockname()[1], "OTHER": KEY}
    names |= {"NUMBERS": {name: numbers[COLUMN] for name, numbers in NUMBERS.items()}, "ATTACKS": attacks}
    return "\n".join([*(f"{name} = {value!r}" for name, value in names.items()), HELPERS, RUN])


RUN = """
for attack in ATTACKS:
    child = os.fork()
    if child == 0:
        try:
            exec(attack)
        except Exception as error:
            print(type(error).__name__, error)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print(chr(0), flush=True)
"""


def _outside(code: str, directory: Path) -> str:
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, timeout=60, check=False).stdout


def _inside(sandbox: LocalSandbox, code: str) -> str:
    name = sandbox.start(Box(Limits(timeout_s=60.0, memory_mb=1024, output_bytes=2**20, processes=8, disk_mb=16)))
    ended = sandbox.run(name, Program([sys.executable, "-I", "-S", "-c", code], "", {})).result(100)
    sandbox.stop(name)
    assert ended.code == 0, ended
    return ended.output


def test_nothing_outside_changes(sandbox: LocalSandbox, victim: Victim) -> None:
    before = victim.state()
    printed = _inside(sandbox, _source(victim, *CHANGES.values())).split("\0")
    assert victim.state() == before, dict(zip(CHANGES, printed, strict=False))


@pytest.mark.long
def test_without_a_sandbox_it_changes(tmp_path: Path) -> None:
    unchanged = []
    for number, (name, attack) in enumerate(CHANGES.items()):
        with _attacked(tmp_path / f"keys-{number}") as victim:
            before = victim.state()
            _outside(_source(victim, attack), tmp_path)
            unchanged += [name] if victim.state() == before else []
    assert len(CHANGES) - len(unchanged) >= MIN_CHANGING, unchanged


def test_nothing_outside_is_known(sandbox: LocalSandbox, victim: Victim, tmp_path: Path) -> None:
    code = _source(victim, *(attack for attack, _ in LEARNS.values()))
    inside, outside = (
        dict(zip(LEARNS, printed.split("\0"), strict=False))
        for printed in (_inside(sandbox, code), _outside(code, tmp_path))
    )
    known = {name for name, (_, marker) in LEARNS.items() if marker in inside[name]}
    assert known <= (LANDLOCK_ALLOWS if sandbox._how == "landlock" else set()), {name: inside[name] for name in known}
    works = {name for name, (_, marker) in LEARNS.items() if marker in outside[name]}
    assert len(works) >= MIN_WORKING, {name: outside[name] for name in LEARNS.keys() - works}


@pytest.mark.parametrize("is_inside", [True, False])
def test_ports_are_closed_to_other_machines(sandbox: LocalSandbox, victim: Victim, is_inside: bool) -> None:
    """`listen` takes a port at every address, without `bind`."""
    source = _source(
        victim, "s = socket.socket(); s.listen(); print('port', s.getsockname()[1], flush=True); time.sleep(1)"
    )
    seen, done = set[int](), threading.Event()
    watcher = threading.Thread(target=_watch, args=(seen, done))
    watcher.start()
    printed = _inside(sandbox, source) if is_inside else _outside(source, victim.file.parent)
    done.set()
    watcher.join()
    ports = [int(line.split()[1]) for line in printed.split("\n") if line.startswith("port ")]
    assert [port in seen for port in ports] == ([False] * len(ports) if is_inside else [True])


def _watch(seen: set[int], done: threading.Event) -> None:
    while not done.wait(0.05):
        for line in Path("/proc/net/tcp").read_text().split("\n")[1:-1]:
            fields = line.split()
            if fields[3] == "0A":
                seen.add(int(fields[1].partition(":")[2], 16))
