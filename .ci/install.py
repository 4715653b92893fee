"""`make install`: X-ray and what it needs, into .venv. Nothing is done where that is already so.

Everything is pinned by constraints.txt. Only torch has several builds. A CPU installation takes the small one, from
local wheels (PIP_FIND_LINKS or UV_FIND_LINKS) or from PyTorch's own index; where neither has it, the package index's
build, which is made for CUDA and larger. Old Pythons must be able to read this file, to be told that they are too old.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / ".installed"
PYTHONS = ((3, 11), (3, 12), (3, 13))
UV = "uv==0.13.8"
SMALL_GB, INDEX_GB, CUDA_GB = 7, 10, 15
"""Disk space of .venv: with a CPU build of torch, with the package index's build, with everything for CUDA."""


def say(text):
    """One line on the screen, at once."""
    print(f"make install: {text}", flush=True)


def missing(extra):
    """A line for each thing that this machine lacks. Nothing is downloaded before there are none."""
    if sys.version_info[:2] not in PYTHONS:
        yield "Python {}.{} is not supported; set PYTHON= to 3.11, 3.12 or 3.13".format(*sys.version_info)
    if (sys.platform, platform.machine()) not in (("linux", "x86_64"), ("linux", "aarch64")):
        yield f"{sys.platform} on {platform.machine()} is not supported; Linux on x86_64 or aarch64 is"
    if importlib.util.find_spec("ensurepip") is None:
        yield "Python's module ensurepip is missing; install python3-venv"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        yield "Python's headers (Python.h) are missing; install python3-dev"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        yield f"the C++ compiler {compiler} is missing; install g++, or set CXX="
    if not os.access(ROOT, os.W_OK):
        yield f"{ROOT} is not writable"
    if extra not in ("cpu", "cuda"):
        yield f"EXTRA={extra} is not allowed; cpu or cuda is"
    if not VENV.exists():
        yield from small_disk(CUDA_GB if extra == "cuda" else SMALL_GB)


def small_disk(needed_gb):
    """A line where an installation does not fit."""
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < needed_gb:
        yield f"{free_gb:.1f} GB of disk space are free in {ROOT}; {needed_gb} GB are needed"


def fails(problems):
    """Whether there are any. Shows them, a line each."""
    lines = [f"error: {problem}" for problem in problems]
    if lines:
        print("\n".join(lines), file=sys.stderr)
    return bool(lines)


def wanted(extra, version):
    """The content of STAMP after an installation; it changes with the checkout's path, the Python and the build."""
    read = ("pyproject.toml", "setup.py", "constraints.txt", ".ci/install.py")
    pinned = b"".join((ROOT / name).read_bytes() for name in read)
    return [extra, version, str(ROOT), hashlib.sha256(pinned).hexdigest()]


def environment():
    """Variables that show uv the local wheels: it does not read pip's variable, whose separator is a space."""
    links = os.environ.get("UV_FIND_LINKS") or ",".join(os.environ.get("PIP_FIND_LINKS", "").split())
    return {**os.environ, "UV_FIND_LINKS": links, "VIRTUAL_ENV": str(VENV)}


def resolve(extra, python, *arguments):
    """The exact versions that an installation takes, one a line; None where there are none."""
    command = [str(BIN / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python", str(BIN / "python"), "--python-version", python, "--constraint", "constraints.txt"]
    command += ["--extra", extra, "--extra", "dev", *arguments, "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return done.stdout.decode() if done.returncode == 0 else None


def torch_build(extra, python):
    """Arguments of uv that choose torch's build, and whether it is the small one."""
    if extra == "cuda":
        return [], False
    if environment()["UV_FIND_LINKS"] and "\nnvidia-" not in (resolve(extra, python) or "\nnvidia-"):
        return [], True
    backend = ["--torch-backend", "cpu"]
    if resolve(extra, python, *backend) is not None:
        return backend, True
    say(f"PyTorch's own index does not answer: torch is the package index's, for CUDA ({INDEX_GB} GB, not {SMALL_GB})")
    return [], False


def uv_install(extra, arguments):
    """Shows what uv says, less the list of packages."""
    command = [str(BIN / "uv"), "pip", "install", "--constraint", "constraints.txt", "--compile-bytecode", *arguments]
    command += ["--editable", f".[{extra},dev]"]
    # It inherits the lock of main(): should this process be killed, the next one waits until uv is gone.
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, close_fds=False) as process:
        for line in process.stderr:
            if not line.startswith((b" + ", b" - ", b" ~ ")):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
    return process.returncode


def install(extra):
    """Exit code."""
    version = "{}.{}".format(*sys.version_info)
    before = STAMP.read_text().splitlines() if STAMP.exists() else []
    if before == wanted(extra, version):
        return 0
    if fails(missing(extra)):
        return 2
    start = time.monotonic()
    STAMP.unlink(missing_ok=True)
    if before[:3] != wanted(extra, version)[:3]:  # another Python or build, a moved or half-made environment
        say(f"Python {version}, {extra}, into {VENV}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    pip = [str(BIN / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV]
    subprocess.run(pip, check=True)
    arguments, small = torch_build(extra, version)
    if not small and not before and fails(small_disk(CUDA_GB if extra == "cuda" else INDEX_GB)):
        return 2
    if uv_install(extra, arguments):
        return 1
    STAMP.write_text("\n".join(wanted(extra, version)) + "\n")
    say(f"done in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


def main():
    """One installation at a time: a second one waits, and then finds nothing to do."""
    lock = os.open(ROOT, os.O_RDONLY)
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("waiting for another installation in this directory")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return install(sys.argv[1])
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(error.cmd)} failed", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
