"""The cost of evidence for each stage of a run: its bytes, and the processor time to make it again.

python -m benchmarks.evidence_of_run OUTPUT     an output directory with a lifecycle that ended

A stage's evidence is its statement, its model signature, its seals, and its entries in the log. The seconds of a stage
are those of its statement, whole ones. Packages that sign are imported once a process, which the last line says.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.envelope import new_private_key, sign
from xray_runtime.kernel.evidence.statement import read_statement
from xray_runtime.kernel.evidence.view import Published
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_manifest
from xray_runtime.kernel.store.manifest import ATTESTATION, SIGNATURE
from xray_runtime.kernel.store.seal import SEALED, Seal
from xray_runtime.trust import provenance
from xray_runtime.trust.log import append
from xray_runtime.trust.model_signature import sign_model, signed_files

ENTRIES = 3
"""A stage's entries in the log: for its parents, its checkpoint, and its records."""


def seconds(work: Callable[[], object]) -> float:
    """Processor time."""
    start = time.process_time()
    work()
    return time.process_time() - start


def remake(directory: Path, scratch: Path, private: Path, num_seals: int) -> None:
    """Make the evidence of a checkpoint again, elsewhere."""
    manifest, sha256 = read_manifest(directory)
    provenance.code()
    statement = sign(read_statement(directory), private.read_bytes())
    if (directory / SIGNATURE).exists():
        sign_model(scratch, signed_files(directory, manifest, sha256), private)
    for _ in range(ENTRIES):
        entry = Published(action="publish", directory=directory.name, checkpoint=sha256)
        append(scratch, entry, {entry.path: entry.sha256 for entry in manifest.files}, private=private)
    seal = Seal(private.read_bytes(), [])
    for number in range(num_seals):
        seal.sign(str(number), statement)


def measure(output: Path, stage: dict[str, Any], private: Path, scratch: Path) -> tuple[float, int, float]:
    """(seconds of a stage, bytes of its evidence, processor seconds of its evidence)."""
    directory = of(output, stage)
    stem = f"{stage['name']}-{stage['key'][:12]}"
    seals = [path for path in output.rglob(f"*{SEALED}") if stem in path.as_posix()]
    files = [*(directory / ATTESTATION).iterdir(), directory / SIGNATURE, *seals]
    size = sum(path.stat().st_size for path in files if path.exists())
    lines = (output / "log.jsonl").read_bytes().splitlines(keepends=True)
    size += sum(len(line) for line in lines if is_about(line, stem, directory.name))
    used = seconds(lambda: remake(directory, scratch, private, len(seals)))
    times = read_statement(directory).predicate.details.metadata
    took = datetime.fromisoformat(times.finished) - datetime.fromisoformat(times.started)
    return max(took.total_seconds(), 1.0), size, used


def of(output: Path, stage: dict[str, Any]) -> Path:
    """The directory of a stage's checkpoint."""
    return output / CHECKPOINTS / Path(stage["checkpoint"]["uri"]).name


def is_about(line: bytes, *names: str) -> bool:
    payload = base64.b64decode(json.loads(line)["payload"])
    return any(name.encode() in payload for name in names)


def main(output: Path) -> None:
    facts = json.loads((output / "lifecycle.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        scratch, private = Path(temporary) / "made", Path(temporary) / "key.pem"
        scratch.mkdir()
        private.write_bytes(new_private_key())
        private.chmod(0o600)
        stages = facts["stages"]
        # Also what is kept for the life of a process: packages, their versions, digests of the code.
        model = next(one for one in reversed(stages) if (of(output, one) / SIGNATURE).exists())
        first = measure(output, model, private, scratch)[2]
        shutil.rmtree(scratch)
        scratch.mkdir()
        print(f"{'stage':20} {'seconds':>9} {'bytes':>9} {'CPU ms':>8} {'share':>7}")
        whole, num_bytes, spent = 0.0, 0, 0.0
        for stage in stages:
            took, size, used = measure(output, stage, private, scratch)
            whole, num_bytes, spent = whole + took, num_bytes + size, spent + used
            print(f"{stage['name']:20} {took:9.1f} {size:9d} {1e3 * used:8.1f} {used / took:7.2%}")
        print(f"{'all':20} {whole:9.1f} {num_bytes:9d} {1e3 * spent:8.1f} {spent / whole:7.2%}")
        print(f"the first time in a process: {1e3 * first:.0f} ms")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
