"""Transfers of weights by the object store and by shared memory: whole or not at all, in bounded memory."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import save_file

from tests.component.processes import gone, pid_of
from tests.message_texts import Messages
from xray_runtime.engines.sync import object_store
from xray_runtime.engines.sync.object_store import (
    Memory,
    ObjectStore,
    WeightTransferError,
    WeightUpdate,
    pack,
    unpack,
    verify,
)
from xray_runtime.engines.sync.shared_memory import SharedReader, SharedWriter
from xray_runtime.engines.sync.versioned import StaleWeightsError, Tensors, VersionedWeights
from xray_runtime.models.tensor_file import WEIGHTS_FILE

MIB = 2**20
NAMES = ("a", "b", "c", "d")


class Engine:
    """Four tensors; `fails_at` breaks a write off before that tensor, as often as `failures` says."""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.fails_at, self.failures = "", 0
        save_file(weights(0), directory / WEIGHTS_FILE)
        self.held = VersionedWeights(directory, self.write)
        self.held.restart(directory)

    def write(self, tensors: Tensors, version: int) -> None:
        for name, tensor in tensors:
            if name == self.fails_at and self.failures:
                self.failures -= 1
                raise RuntimeError("out of memory")
            self.tensors[name] = tensor.clone()

    def values(self) -> list[float]:
        return [float(self.tensors[name][0]) for name in NAMES]


@pytest.fixture
def engine(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(object_store, "BUCKET_BYTES", 128)  # two tensors
    return Engine(tmp_path)


@pytest.fixture(params=[ObjectStore, SharedWriter])
def memory(request: pytest.FixtureRequest) -> Memory:
    return request.param()


def weights(value: float, names: tuple[str, ...] = NAMES) -> dict[str, torch.Tensor]:
    return {name: torch.full((16,), float(value)) for name in names}


def test_weights_survive_the_trip_in_several_buckets(
    cluster: None, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(object_store, "BUCKET_BYTES", 1000)
    sent = {f"w{i}": torch.randn(i + 1, 37, dtype=dtype) for i, dtype in enumerate([torch.float32, torch.bfloat16] * 4)}
    sent["transposed"] = torch.randn(3, 5).T
    sent["one number"] = torch.tensor(2.5)
    update, reader = pack(sent.items(), 5, memory), SharedReader()
    assert len(update.buckets) > 2
    arrived = {name: tensor for bucket in update.buckets for name, tensor in unpack(bucket, reader)}
    assert arrived.keys() == sent.keys()
    assert all(torch.equal(arrived[name], sent[name]) and arrived[name].dtype == sent[name].dtype for name in sent)
    assert update.num_bytes == sum(t.numel() * t.element_size() for t in sent.values())


def test_one_flipped_bit_is_found_and_named(cluster: None, message_texts: Messages) -> None:
    update = pack([("a", torch.randn(8)), ("b", torch.randn(8))], version=1)
    with message_texts.raises(WeightTransferError):
        verify(flipped(update, 0, 1))


def test_ranks_on_a_node_divide_the_checksums(engine: Engine, message_texts: Messages) -> None:
    update = pack(weights(1).items(), version=1)
    damaged = flipped(update, 1, 0)
    engine.held.verify(damaged, 0, 2)
    with message_texts.raises(WeightTransferError):
        engine.held.verify(damaged, 1, 2)
    engine.held.load(update, verified=True)
    engine.held.use(1)
    assert engine.values() == [1, 1, 1, 1]


def flipped(update: WeightUpdate, bucket: int, entry: int) -> WeightUpdate:
    """`update` with one bit of one tensor changed on the way."""
    damaged = update.buckets[bucket]
    data = np.array(ray.get(damaged.ref))
    data[damaged.entries[entry].offset] ^= 1
    buckets = list(update.buckets)
    buckets[bucket] = dataclasses.replace(damaged, ref=ray.put(data))
    return dataclasses.replace(update, buckets=tuple(buckets))


def drop(engine: Engine) -> bool:
    """As vLLM does it at level 2 of its sleep: the memory comes back with other bits."""
    if dropped := engine.held.drop():
        engine.tensors = {name: torch.full((16,), torch.nan) for name in NAMES}
    return dropped


def test_weights_are_dropped_only_where_the_next_update_brings_all_of_them(
    engine: Engine, message_texts: Messages
) -> None:
    # None was updated yet, or a part (LoRA, a frozen trunk): the rest would be lost.
    assert not drop(engine)
    engine.held.load(pack(weights(1, ("a", "b")).items(), version=1))
    assert not drop(engine)
    engine.held.use(1)
    engine.held.load(pack(weights(2).items(), version=2))
    assert drop(engine)
    with message_texts.raises(StaleWeightsError):
        engine.held.use(2)
    engine.held.load(pack(weights(3).items(), version=3))
    engine.held.use(3)
    assert engine.values() == [3, 3, 3, 3]
    # A part after all: what is missing comes from the version before.
    assert drop(engine)
    engine.held.load(pack(weights(4, ("a", "b")).items(), version=4))
    engine.held.use(4)
    assert engine.values() == [4, 4, 3, 3]


def test_a_transfer_that_lacks_dropped_weights_is_refused(engine: Engine, message_texts: Messages) -> None:
    def send(value: float, names: tuple[str, ...], version: int) -> None:
        for step in ("start", "update", "finish"):
            brought = names if step == "update" else ()
            tensors = iter(weights(value, brought).items())
            write = functools.partial(engine.write, tensors, version)
            engine.held.receive(write, version, first=step == "start", last=step == "finish", names=brought)

    send(1, NAMES, 1)
    assert drop(engine)
    send(2, NAMES, 2)
    engine.held.use(2)
    assert engine.values() == [2, 2, 2, 2]
    assert drop(engine)
    with message_texts.raises(StaleWeightsError):
        send(3, ("a", "b"), 3)
    # Such weights are not kept: the checkpoint is what is left.
    engine.held.use(0)
    assert engine.values() == [0, 0, 0, 0]


def test_a_damaged_or_lost_bucket_touches_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, message_texts: Messages
) -> None:
    good = pack(weights(1).items(), version=1)
    assert len(good.buckets) == 2
    engine.fails_at, engine.failures = "a", 1  # whoever writes anything fails
    with message_texts.raises(WeightTransferError):
        engine.held.load(flipped(good, 1, 1))

    monkeypatch.setattr(object_store, "GET_SECONDS", 0.5)
    lost = dataclasses.replace(good.buckets[1], ref=ray.ObjectRef.from_random())
    with message_texts.raises(WeightTransferError):
        engine.held.load(dataclasses.replace(good, buckets=(good.buckets[0], lost)))
    assert engine.values() == [0, 0, 0, 0]
    assert engine.held.version == 0
    assert engine.failures == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_load_that_breaks_off_is_undone_and_can_be_tried_again(engine: Engine, name: str, memory: Memory) -> None:
    engine.held.load(pack(weights(1).items(), 1, memory))
    engine.held.load(pack(weights(2, ("c",)).items(), 2, memory))
    update = pack(weights(3).items(), 3, memory)
    engine.fails_at, engine.failures = name, 1
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.held.load(update)
    engine.held.use(2)
    assert engine.values() == [1, 1, 2, 1]
    engine.held.load(update)
    engine.held.use(3)
    assert engine.values() == [3, 3, 3, 3]


def test_an_engine_that_cannot_go_back_refuses_until_it_is_whole_again(engine: Engine, message_texts: Messages) -> None:
    engine.fails_at, engine.failures = "c", 2  # the load, and the way back
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.held.load(pack(weights(1).items(), version=1))
    for version in (0, 1):
        with message_texts.raises(StaleWeightsError):
            engine.held.use(version)
    # An update of a part first needs the rest to be whole.
    engine.held.load(pack(weights(2, ("a",)).items(), version=2))
    engine.held.use(2)
    assert engine.values() == [2, 0, 0, 0]


def test_a_load_can_be_reverted_until_it_is_used(engine: Engine, memory: Memory, message_texts: Messages) -> None:
    engine.held.load(pack(weights(1, ("b",)).items(), 1, memory))
    engine.held.use(1)
    engine.held.load(pack(weights(2).items(), 2, memory))
    for value in (3, 4):  # nobody takes these over
        pack(weights(value).items(), value, memory)
    engine.held.revert()
    engine.held.use(1)
    assert engine.values() == [0, 1, 0, 0]
    with message_texts.raises(StaleWeightsError):
        engine.held.revert()


def test_two_updates_take_turns_in_memory_that_is_mapped_once(engine: Engine) -> None:
    writer = SharedWriter()
    files = set()
    for version in range(1, 9):
        update = pack(weights(version).items(), version, writer)
        files |= {bucket.ref.inode for bucket in update.buckets}
        engine.held.load(update)
        engine.held.use(version)
        assert engine.values() == [version] * 4
    # Two buckets an update: two updates. The writer's mappings and the reader's are both in this process.
    assert len(files) == 4
    assert sorted(mapped_files(files)) == sorted([*files, *files])
    engine.held.forget()
    assert sorted(mapped_files(files)) == sorted(files)


def test_a_follower_that_fails_keeps_its_old_weights(engine: Engine) -> None:
    """Another follower of the same trainer goes on while this one fails, and goes back."""
    writer, other = SharedWriter(), SharedReader()
    engine.held.load(pack(weights(1).items(), 1, writer))
    engine.held.use(1)
    for version in range(2, 6):
        update = pack(weights(version).items(), version, writer)
        verify(update, other)
        engine.fails_at, engine.failures = "c", 1
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.held.load(update)
        other.keep([bucket.ref for bucket in update.buckets])
        assert engine.values() == [1, 1, 1, 1]


def test_shared_memory_ends_with_those_who_use_it(engine: Engine, message_texts: Messages) -> None:
    """A trainer and a reader are killed in turn: what was taken over stays, nothing else does, and no name anywhere."""

    @ray.remote(num_cpus=0, max_restarts=0)
    class Process:
        def __init__(self) -> None:
            self._writer, self._reader = SharedWriter(), SharedReader()

        def export(self, version: int) -> WeightUpdate:
            return pack(weights(version).items(), version, self._writer)

        def hold(self, update: WeightUpdate) -> None:
            verify(update, self._reader)

    before = set(Path("/dev/shm").iterdir())
    trainer, reader = Process.remote(), Process.remote()
    first = ray.get(trainer.export.remote(1))
    ray.get(reader.hold.remote(first))
    ray.get(trainer.export.remote(2))
    third = ray.get(trainer.export.remote(3))
    assert third.buckets[0].ref != first.buckets[0].ref  # the reader holds it
    reader_pid = pid_of(reader)
    os.kill(reader_pid, signal.SIGKILL)
    assert gone(reader_pid)  # an export while it dies could take one of its two files, and the fifth the other
    ray.get(trainer.export.remote(4))
    fifth = ray.get(trainer.export.remote(5))
    engine.held.load(fifth)
    assert {bucket.ref for bucket in first.buckets} <= {
        bucket.ref for version in (6, 7) for bucket in ray.get(trainer.export.remote(version)).buckets
    }
    files = {bucket.ref.inode for bucket in fifth.buckets}
    lost, pid = ray.get(trainer.export.remote(8)), pid_of(trainer)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    with message_texts.raises(WeightTransferError):
        engine.held.load(lost)
    # A write that breaks off is undone with the dead trainer's bytes; its successor is followed, and they are let go.
    engine.fails_at, engine.failures = "b", 1
    writer = SharedWriter()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.held.load(pack(weights(9).items(), 9, writer))
    assert engine.values() == [5, 5, 5, 5]
    assert set(mapped_files(files)) == files
    engine.held.load(pack(weights(9).items(), 9, writer))
    engine.held.use(9)
    assert engine.values() == [9, 9, 9, 9]
    assert mapped_files(files) == []
    assert set(Path("/dev/shm").iterdir()) <= before


def mapped_files(inodes: set[int]) -> list[int]:
    """Those of a writer's files that this process has mapped, as often as it has."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:weights" in line)
    return [int(words[4]) for words in lines if int(words[4]) in inodes]


def test_a_transfer_takes_one_bucket_of_memory(cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """32 buckets of 2 MiB. Two are allowed for; measured is one in the trainer, next to none in the generator."""
    monkeypatch.setattr(object_store, "BUCKET_BYTES", 2 * MIB)
    model = {f"w{i}": torch.randn(MIB // 4) for i in range(64)}
    own = {name: torch.zeros_like(tensor) for name, tensor in model.items()}

    def write(tensors: Tensors, version: int) -> None:
        for name, tensor in tensors:
            own[name].copy_(tensor)

    pack([("warm", torch.zeros(8))], version=0)
    updates: list[WeightUpdate] = []
    packing = peak_of(lambda: updates.append(pack(model.items(), version=1)))
    assert len(updates[0].buckets) == 32
    loading = peak_of(lambda: VersionedWeights(tmp_path, write).load(updates[0]))
    assert packing <= 2 * 2 * MIB
    assert loading <= 2 * 2 * MIB
    assert all(torch.equal(own[name], model[name]) for name in model)


def peak_of(work: Callable[[], None]) -> int:
    """Bytes of memory of its own (mapped objects are shared) that this process holds more at `work`'s peak."""
    done = threading.Event()
    seen: list[int] = []

    def anonymous() -> int:
        memory = psutil.Process().memory_info()
        return int(memory.rss - memory.shared)

    def watch() -> None:
        while not done.is_set():
            seen.append(anonymous())
            done.wait(0.0005)

    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max([*seen, anonymous()]) - before
