"""Programs in sandboxes that try to reach what is not theirs. Each prints `got` only if it succeeds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sweeps import sweep
from tests.unit.agents.answering import Answering, serving
from xray_runtime.agents.local_sandbox import LocalSandbox
from xray_runtime.agents.sandboxes.base import Box, Ended, Limits, Program
from xray_runtime.kernel.confine import confine
from xray_runtime.kernel.confine.confine import OWN_ROOM, Confinement

LIMITS = Limits(timeout_s=20.0, memory_mb=1024, output_bytes=2**20, processes=8, disk_mb=16)
HAS = {how: confine._why_not(how) is None for how in ("bubblewrap", "namespaces", "landlock")}
HIDDEN = "hidden-from-programs"


@dataclass
class Place:
    """Sandboxes of one kind, a gateway and what must stay out of reach."""

    how: Confinement
    sandbox: LocalSandbox
    gateway: str
    log: Path

    def begin(self, code: str, box: Box | None = None, **limits: Any) -> tuple[str, Future[Ended]]:
        found = box or Box(replace(LIMITS, **limits), gateway=self.gateway)
        name = self.sandbox.start(found)
        variables = {"GATEWAY": self.sandbox.address(self.gateway), "TOKEN": f"token-{name}"}
        return name, self.sandbox.run(name, Program([sys.executable, "-c", code], "task", variables))

    def run(self, code: str, box: Box | None = None, **limits: Any) -> Ended:
        name, ended = self.begin(code, box, **limits)
        found = ended.result(100)
        self.sandbox.stop(name)
        return found


class Hello(Answering):
    def do_GET(self) -> None:
        self.answer(b"hello")


@pytest.fixture(scope="module", params=HAS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if not HAS[request.param]:
        pytest.skip(f"this machine has no {request.param}")
    log = tmp_path_factory.mktemp("log") / "agents.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XRAY_TEST_SECRET", HIDDEN)
        sandbox = LocalSandbox(log, request.param, accepts_weak=True)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Hello)) as server:
        yield Place(request.param, sandbox, f"http://127.0.0.1:{server.server_port}", log)
        sandbox.close()


def test_a_program_gets_its_files_its_input_and_the_gateway(place: Place, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("content")
    code = """
import os, pathlib, sys, tempfile, urllib.request
print("to the log", file=sys.stderr)
pathlib.Path("sub/file").write_text(pathlib.Path("sub/file").read_text() + " changed")
assert pathlib.Path.home() == pathlib.Path.cwd()
tempfile.TemporaryFile().close()
for _ in range(20):
    answer = urllib.request.urlopen(os.environ["GATEWAY"]).read().decode()
print(input(), pathlib.Path("sub/file").read_text(), answer)
sys.exit(3)
"""
    box = Box(LIMITS, tmp_path, gateway=place.gateway)
    # The second begins with the same files.
    assert [place.run(code, box) for _ in range(2)] == [Ended(3, "task content changed hello\n")] * 2
    assert (tmp_path / "sub" / "file").read_text() == "content"
    assert "to the log" in place.log.read_text()


MACHINE = {
    "/etc/shadow": "open('/etc/shadow').read()",
    "the home directory": "os.listdir({home!r}) == {names!r} or 1 / 0",
    "a process's files": "os.listdir('/proc/{parent}/root' + {directory!r})",
    "a new file elsewhere": "open({directory!r} + '/new', 'w')",
    "a program replaced": "open('/usr/bin/new', 'w')",
    "a file of our Python replaced": "open({library!r}, 'a')",
    "a name in /etc": "open('/etc/new', 'w')",
    "a device": "open('/dev/vda', 'rb').read(1)",
    "our variables": "{hidden!r} in os.environ.values() or 1 / 0",
    "variables of the first process": "{hidden!r} in open('/proc/1/environ').read() or 1 / 0",
    "an open file of ours": "[os.fstat(number) for number in range(3, 64) if is_open(number)][0]",
}
"""What a program may not reach, and code that succeeds only if it does; `sandboxes.attacks` has what it may not do to
another process."""
TRIES = """
import os
def is_open(number):
    try: return bool(os.fstat(number))
    except OSError: return False
for name, code in {}.items():
    try: print(name, eval(code))
    except Exception: pass
"""


def test_a_program_reaches_nothing_of_the_machine(place: Place, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o777)
    known = {"home": str(Path.home()), "names": os.listdir(Path.home()), "directory": str(tmp_path)}
    known |= {"library": os.__file__, "parent": os.getpid(), "hidden": HIDDEN}
    codes = {name: code.format(**known) for name, code in MACHINE.items()}
    assert place.run(TRIES.replace("{}", repr(codes))) == Ended(0, "")
    assert not (tmp_path / "new").exists()


def test_files_processes_and_variables_of_another_are_out_of_reach(place: Place) -> None:
    waits = (
        "import os, time; open('mine', 'w').write('secret-of-another'); print(os.getcwd(), flush=True); time.sleep(4)"
    )
    looks = """
import glob, os, signal
found = []
patterns = "/proc/[0-9]*/environ", "/proc/[0-9]*/cwd/mine", "/tmp/*/mine", HOME + "/mine"
for path in [path for pattern in patterns for path in glob.glob(pattern)] + [HOME + "/mine"]:
    try:
        text = open(path, "rb").read()
        found += [path] if b"secret-of-another" in text or b"TOKEN=OTHER" in text else []
    except OSError: pass
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
print(found)
"""
    name, other = place.begin(waits)
    home = place.sandbox._started[name].home
    time.sleep(1.0)
    looks = looks.replace("HOME", repr(str(home))).replace("OTHER", f"token-{name}")
    looked = place.run(looks)
    # The signal ends at most who sent it.
    assert looked == Ended(0, "[]\n") or (looked.code, looked.output) == (-9, "")
    assert other.result(100).code == 0
    place.sandbox.stop(name)
    assert not home.exists()


BREAKS = {
    "hangs and ignores signals": (
        "import signal, time\n"
        "for n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: time.sleep(1)",
        {"timeout_s": 1.0},
        "it took longer than timeout_s = 1",
    ),
    "forks in sessions of their own": (
        # At most 512 of them, also where nothing ends them.
        "import os, time\nfor _ in range(9):\n    try: os.fork() or os.setsid()\n    except OSError: pass\n"
        "time.sleep(60)",
        {},
        "it had more than max_processes = 8",
    ),
    "floods its output": ("while True: print('x' * 10000)", {}, "it wrote more than output_mb = 1"),
    "floods its errors": (
        "import sys\nwhile True: sys.stderr.write('x' * 10000)",
        {},
        "it wrote more than output_mb = 1",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_program_that_breaks_a_limit_ends_with_all_its_processes(place: Place, name: str) -> None:
    code, limits, why = BREAKS[name]
    assert place.run(code, **limits) == Ended(broken=why)
    worker = psutil.Process(place.sandbox._worker._process.pid)
    assert worker.children(recursive=True) == []
    assert place.run("print(1)") == Ended(0, "1\n")


def test_memory_files_and_disk_are_limited(place: Place) -> None:
    assert place.run("x = bytearray(2 ** 31)").code == 1
    opens = "import os\nn = 0\nwhile n < 5000: os.open('/', 0); n += 1"
    assert place.run(opens).code == 1
    if place.how in OWN_ROOM:
        fills = "import os\nn = 0\nwhile n < 64: open(f'{DIR}/{n}', 'wb').write(bytes(2 ** 20)); n += 1"
        for directory in (".", "/dev/shm"):
            assert place.run(fills.replace("{DIR}", directory)).code == 1
        assert place.run("open('/new', 'w')").code == 1


def test_daemons_end_with_their_program(place: Place) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in range(3): os.close(stream)
        time.sleep(600)
    os._exit(0)
os.wait()
print("left")
"""
    assert place.run(code) == Ended(0, "left\n")
    assert psutil.Process(place.sandbox._worker._process.pid).children(recursive=True) == []


def test_a_stopped_sandbox_is_gone(place: Place) -> None:
    name, ended = place.begin("import time; time.sleep(100)")
    home = place.sandbox._started[name].home
    place.sandbox.stop(name)
    place.sandbox.stop(name)
    assert ended.result(10).broken == "it was stopped"
    assert not home.exists()


def test_sandboxes_end_with_who_asks(place: Place, tmp_path: Path) -> None:
    """Also by SIGKILL."""
    asks = f"""
import pathlib
from xray_runtime.agents.local_sandbox import LocalSandbox
from xray_runtime.agents.sandboxes.base import Box, Limits, Program
sandbox = LocalSandbox(pathlib.Path({str(tmp_path / "log")!r}), {place.how!r}, True)
name = sandbox.start(Box(Limits(600.0, 1024, 1000, 8, 16)))
sandbox.run(name, Program(["sleep", "600"], "", {{}}))
print(sandbox._worker._process.pid, flush=True)
import time; time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        while not any(child.name() == "sleep" for child in worker.children(recursive=True)):
            time.sleep(0.05)
        children = worker.children(recursive=True)
        process.kill()
    assert psutil.wait_procs([worker, *children], timeout=20)[1] == []


PROGRAMS = {
    "git": "git init -q a && cd a && git config user.name x && git config user.email x && echo 1 > f && git add f && "
    "git commit -qm m && git gc -q && git clone -q . ../b && git -C ../b log --format=%s",
    "tar, sed and coreutils": "mkdir -p a/b && echo x > a/b/f && chmod 640 a/b/f && touch -d 2001-02-03 a/b/f && "
    "tar czf a.tgz a && mkdir c && tar xzf a.tgz -C c && sed -i s/x/y/ c/a/b/f && cp -a c d && mv d e && ln -s e g && "
    "rm -r c && stat -c %a e/a/b/f && install -m 700 e/a/b/f h && find . -name f -newer a/b/f",
    "pipes": "seq 9 | sort -r | head -n 2 && diff <(echo 1) <(echo 1) && mkfifo p && (echo hi > p &) && cat p && "
    "(timeout 0.1 sleep 9 || test $? = 124) && seq 3 | xargs -P 3 -n 1 echo | wc -l",
    "a compiler": "echo 'int main(void) { return 0; }' > a.c && cc a.c -o a && ./a",
    "node": """node -e 'require("child_process").execSync("true"); setTimeout(() => console.log(1), 9)'""",
    "a terminal": "script -qc 'tty && stty size' /dev/null",
    "threads and processes": """{python} -c '
import asyncio, concurrent.futures, multiprocessing, subprocess, threading
thread = threading.Thread(target=print, args=["thread"]); thread.start(); thread.join()
subprocess.run(["true"], check=True, timeout=9)
child = subprocess.Popen(["sleep", "99"]); child.terminate(); child.wait()
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, 2]))
async def main():
    child = await asyncio.create_subprocess_exec("echo", "a", stdout=-1)
    print(await child.communicate(), await asyncio.to_thread(abs, -1))
asyncio.run(main())'""",
    "files of Python": """{python} -c '
import fcntl, mmap, os, pathlib, shutil, sqlite3, tempfile, venv
base = sqlite3.connect("a.db"); base.execute("PRAGMA journal_mode=WAL"); base.execute("create table t (x)")
base.execute("insert into t values (1)"); base.commit(); print(base.execute("select * from t").fetchall())
with tempfile.NamedTemporaryFile() as file:
    file.write(bytes(9)); file.flush(); fcntl.flock(file, fcntl.LOCK_EX); mmap.mmap(file.fileno(), 9).close()
with tempfile.TemporaryDirectory() as place: pathlib.Path(place, "x").write_text("1")
shutil.copy2("a.db", "b.db"); os.replace("b.db", "c.db"); shutil.copytree(".", "/tmp/d"); shutil.rmtree("/tmp/d")
shutil.make_archive("x", "zip", "."); venv.create("v", symlinks=True)'
v/bin/python -c 'print(1)'""",
    "numpy and pytest": """{python} -c '
import numpy; print(numpy.linalg.inv(numpy.eye(300)).sum())'
echo 'def test_a(tmp_path): (tmp_path / "a").write_text("1")' > test_a.py && {python} -m pytest -q test_a.py""",
    "a server of its own": """{python} -c '
import http.server, threading, urllib.request
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(len(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").read()) > 0)'""",
    "the gateway": """{python} -c '
import os, urllib.request
print(urllib.request.urlopen(os.environ["GATEWAY"]).read())'""",
}


# Landlock alone refuses what it cannot keep from other files.
@pytest.mark.parametrize(
    ("place", "name"),
    [*sweep([how for how in ("bubblewrap", "namespaces") if HAS[how]], list(PROGRAMS)), ("landlock", "the gateway")],
    indirect=["place"],
)
def test_ordinary_programs_work(place: Place, name: str) -> None:
    box = Box(replace(LIMITS, timeout_s=100.0, memory_mb=8192, processes=40, disk_mb=256), gateway=place.gateway)
    started = place.sandbox.start(box)
    command = ["bash", "-euo", "pipefail", "-c", PROGRAMS[name].replace("{python}", sys.executable)]
    variables = {"GATEWAY": place.sandbox.address(place.gateway), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = place.sandbox.run(started, Program(command, "", variables)).result(120)
    place.sandbox.stop(started)
    assert ended.code == 0, (ended, place.log.read_text()[-2000:])


BEST = [
    ((), "bubblewrap", None),
    (("bubblewrap",), "namespaces", None),
    (("bubblewrap", "namespaces"), "landlock", "Landlock alone would let an agent see which files exist"),
    (("bubblewrap", "namespaces", "landlock"), "limits", "an agent could read and change your files"),
]


@pytest.mark.parametrize(("missing", "expected", "why"), BEST)
def test_missing_isolation_must_be_accepted_explicitly(
    missing: tuple[str, ...],
    expected: Confinement,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(confine, "_why_not", lambda how: "it is broken" if how in missing else None)
    confine.confinement.cache_clear()
    try:
        assert [confine.confinement(), confine.confinement()] == [expected] * 2
        assert len(caplog.messages) == (why is not None)
        if why is not None:
            with pytest.raises(
                ValueError, match=rf"^environment.accept_weak_sandbox = false .*\(it is broken\), and {why}"
            ):
                LocalSandbox(tmp_path / "log")
        LocalSandbox(tmp_path / "log", accepts_weak=True).close()
    finally:
        confine.confinement.cache_clear()


def test_isolation_the_kernel_refuses_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason is the kernel's, not that of a machine without Landlock or bubblewrap."""
    monkeypatch.setattr(confine.shutil, "which", lambda name: None)
    monkeypatch.setattr(confine.landlock, "version", lambda: 5)
    assert confine._why_not("bubblewrap") == "it is not installed"
    assert confine._why_not("landlock") == "Linux has version 5, and 6 is needed"
    broken = confine.inside.__file__.replace("inside", "missing")
    monkeypatch.setattr(confine.inside, "__file__", broken)
    assert "No such file" in str(confine._why_not("namespaces"))


def test_a_virtual_environment_shows_no_more_than_it_needs(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").write_text("home = /bin\nversion = 3.11\n")
    assert Path("/") not in confine.venv_paths(tmp_path / "venv")
