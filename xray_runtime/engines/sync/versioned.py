"""Versioned weights of a generator: an update is loaded completely or not at all.

`VersionedWeights` knows the source of every tensor: the checkpoint the engine started from, or the last update with the
tensor, which is kept. Order of a load:

1. verify every checksum of the update before anything is changed (ranks on one node may divide this: `verify`);
2. write the update into the engine, with the held tensors of layers that it only has a part of;
3. if that fails midway, write *all* weights held before back into the engine. If that fails too, the engine holds
   nothing usable: it refuses to generate, and the next load first repeats step 3.

The previous update is kept until the engine is used at the new version, so that all replicas of a generator can go back
together (`revert`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch

from xray_runtime.engines.sync.object_store import Bucket, WeightUpdate, unpack, verify
from xray_runtime.engines.sync.shared_memory import SharedBytes, SharedReader
from xray_runtime.models.weight_files import tensors_in, weight_files

Tensors = Iterator[tuple[str, torch.Tensor]]
Write = Callable[[Tensors, int], None]
"""`write(tensors, version)`: write (Hugging Face name, whole tensor) pairs into an engine, which then is at `version`.
Other tensors stay. After a failure it may be called again with all tensors."""


class StaleWeightsError(RuntimeError):
    """The generator does not hold the requested policy version."""


class VersionedWeights:
    """The weights of one engine, with the checkpoint `directory` as version 0.

    Args:
        layers_of: adds to names all others that must be written together with them.
        files_in: name → file of the tensors of a checkpoint that updates replace.
    """

    def __init__(
        self,
        directory: Path,
        write: Write,
        layers_of: Callable[[set[str]], set[str]] = lambda names: names,
        files_in: Callable[[Path], Mapping[str, Path]] = weight_files,
    ) -> None:
        self._files_in = files_in
        self.version = 0
        self._directory, self._write, self._layers_of = directory, write, layers_of
        self._shared = SharedReader()
        self._kept_version = 0
        self._arrived: dict[str, Bucket] = {}
        self._before: tuple[int, dict[str, Bucket]] | None = None
        self._whole, self._dropped = True, False
        self._brought: set[str] = set()
        """The tensors of the last update."""

    def verify(self, update: WeightUpdate, number: int, checkers: int) -> None:
        """Verify this rank's share of `update`, part `number` of `checkers`. Raises WeightTransferError: a tensor is
        damaged or lost."""
        try:
            verify(update, self._shared, number, checkers)
        except Exception:
            self._release()
            raise

    def load(self, update: WeightUpdate, *, verified: bool = False) -> None:
        """Load all weights of `update`, or none if anything fails.

        Args:
            verified: whether this rank and its peers have verified all of it.

        Raises:
            WeightTransferError: a tensor is damaged or lost; nothing was changed.
            Exception: an exception of the engine, which holds the previous weights again.
        """
        try:
            if not verified:
                verify(update, self._shared)
            names = {entry.name for bucket in update.buckets for entry in bucket.entries}
            others = self._layers_of(names) - names
            if not self._whole and not (self._dropped and self._are_all(names | others)):
                self._restore()
            try:
                self._whole = False
                self._write(self._with_layers(update, others), update.version)
                self._whole, self._dropped, self._brought = True, False, names
            except Exception:
                self._restore()
                raise
            self._before = self._kept_version, self._arrived
            self._arrived = self._arrived | {entry.name: b for b in update.buckets for entry in b.entries}
            self.version = self._kept_version = update.version
        finally:
            self._release()

    def receive(
        self, step: Callable[[], None], version: int, *, first: bool, last: bool, names: Collection[str] = ()
    ) -> None:
        """A step of a transfer without the object store, which brings the tensors `names`; `version` is held after the
        `last` step.

        Such weights are not kept, so after a failure the engine returns to the last version that is. Raises
        StaleWeightsError: the engine dropped its weights before, and not all of them came back.
        """
        if first:
            self._brought = set()
            if not self._whole and not self._dropped:
                self._restore()
        self._whole = False
        try:
            step()
            self._brought |= set(names)
            if last and self._dropped and not self._are_all(self._brought):
                raise StaleWeightsError(f"policy version {version} lacks weights that the generator dropped before it")
        except Exception:
            self._restore()
            raise
        if last:
            self._whole, self._dropped, self.version, self._before = True, False, version, None

    def revert(self) -> None:
        """Undo the last `load`, unless the engine was used since."""
        if self._before is None:
            raise StaleWeightsError(f"there is no version before policy version {self.version}")
        (self._kept_version, self._arrived), self._before = self._before, None
        self._restore()
        self._release()

    def restart(self, directory: Path, version: int = 0) -> None:
        """Hold the weights of `directory`, a checkpoint of the same shape, as `version`."""
        self.forget()
        self._directory, self._kept_version = directory, version
        self._restore()

    @property
    def is_as_read(self) -> bool:
        """Whether the engine holds the checkpoint's own weights: no update came since `restart`."""
        return self._whole and not self._arrived and self.version == self._kept_version

    def drop(self) -> bool:
        """Let the engine lose its weights: until an update with all of them it holds nothing usable. False, and nothing
        is lost, unless the last update brought all of them, as the next will."""
        if self._whole and self._are_all(self._brought):
            self._whole, self._dropped = False, True
        return self._dropped

    def forget(self) -> None:
        """Drop all updates; the engine holds nothing usable until `restart`."""
        self._arrived, self._before, self._whole, self._dropped, self._brought = {}, None, False, False, set()
        self._release()

    def use(self, version: int) -> None:
        """Prepare to use the engine at `version`; drops the version before. Raises StaleWeightsError: the engine holds
        another version, or nothing usable."""
        if not self._whole or self.version != version:
            state = f"version {self.version}" if self._whole else "nothing usable (a load failed midway)"
            raise StaleWeightsError(f"policy version {version} was requested, but the generator holds {state}")
        self._before = None
        self._release()

    def _restore(self) -> None:
        self._whole = False
        self._write(self.held(), self._kept_version)
        self._whole, self._dropped, self.version = True, False, self._kept_version

    def _are_all(self, names: Collection[str]) -> bool:
        wanted = self._files_in(self._directory).keys()
        return bool(wanted) and wanted <= set(names)

    def _with_layers(self, update: WeightUpdate, others: set[str]) -> Tensors:
        for bucket in update.buckets:
            # Already verified, and locked against writers by the rank that did.
            yield from unpack(bucket, self._shared, check=False)
        if others:
            yield from self.held(others)

    def held(self, names: set[str] | None = None) -> Tensors:
        """The tensors `names` (None: all) as they were before an update that is being loaded."""
        files = self._files_in(self._directory)
        wanted = files.keys() if names is None else names
        yield from tensors_in(files, wanted - self._arrived.keys())
        for bucket in {id(bucket): bucket for bucket in self._arrived.values()}.values():
            for name, tensor in unpack(bucket, self._shared):
                if self._arrived[name] is bucket and (names is None or name in names):
                    yield name, tensor

    def _release(self) -> None:
        """Release shared memory that is not needed for going back."""
        before = {} if self._before is None else self._before[1]
        buckets = [*self._arrived.values(), *before.values()]
        self._shared.keep({bucket.ref for bucket in buckets if isinstance(bucket.ref, SharedBytes)})
