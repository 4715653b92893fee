"""A small checkpoint and a small snapshot."""

from __future__ import annotations

from pathlib import Path

from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.digest_memory import DigestMemory
from xray_runtime.kernel.store.identity import Identity, file_sha256
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.shards import Shard, index_path
from xray_runtime.kernel.store.shared import SharedStore
from xray_runtime.kernel.store.snapshots import Snapshots

IDENTITY = Identity(
    stage="sft",
    kind="sft",
    config={"lr": 1e-3},
    seed=0,
    parents={"base": "cd" * 32},
    functions={},
    code={"xray_runtime.methods.sft.body": "ef" * 32},
    versions={"torch": "2"},
)


KEY = IDENTITY.key


def publish(
    root: Path, content: bytes = b"weights", shared: SharedStore | None = None, memory: DigestMemory | None = None
) -> CheckpointRef:
    store = Store(root, shared, memory=memory)
    with store.building("sft", KEY) as built:
        (built / "model.bin").write_bytes(content)
        (built / "head").mkdir()
        (built / "head" / "h.bin").write_bytes(b"head")
        return store.publish(built, IDENTITY, type="Model", step=3, dataset=None)


def write_snapshot(snapshots: Snapshots, step: int, content: bytes = b"weights") -> None:
    with snapshots.writing(step, {"step": step}) as directory:
        (directory / "policy").mkdir()
        (directory / "policy" / "part").write_bytes(content)


def write_shard(file: Path, content: bytes) -> Shard:
    """A shard of a snapshot, and its index."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    shard = Shard(file=file.name, sha256=file_sha256(file), size=len(content), step=3, pieces={})
    index_path(file).write_text(shard.model_dump_json())
    return shard
