"""Which weights a generator holds, and the way back to them: a transfer is taken over whole, or not at all.

`VersionedWeights` knows, for every tensor, where its last good bytes are: in the checkpoint the engine started from, or
in the last update that has it, which is kept. Order of a load:

1. verify every checksum of the update, before anything is touched;
2. write it into the engine, with what is held of layers of which it has a part;
3. where that fails half-way, write *all* weights held before back into the engine. Only if that fails too does the
   engine hold nothing usable: it then refuses to generate, and the next load first repeats step 3.

The update before the last is kept until the engine is used at the new version, so that a generator of several replicas
can go back as one (`revert`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from xray_runtime.models.tensor_file import WEIGHTS_FILE
from xray_runtime.weights.object_store import Bucket, WeightUpdate, unpack, verify
from xray_runtime.weights.shared_memory import SharedBytes, SharedReader

Tensors = Iterator[tuple[str, torch.Tensor]]
Write = Callable[[Tensors, int], None]
"""`write(tensors, version)`: put (Hugging Face name, whole tensor) pairs into an engine, which then is at `version`.
What is not named stays. It may be called again after it failed, with all tensors."""


class StaleWeightsError(RuntimeError):
    """The generator does not hold the policy version it was asked to generate with."""


class VersionedWeights:
    """The weights of one engine, started on `directory` as version 0.

    Args:
        layers_of: names → these and all others that must be written together with them.
    """

    def __init__(
        self, directory: Path, write: Write, layers_of: Callable[[set[str]], set[str]] = lambda names: names
    ) -> None:
        self.version = 0
        self._directory, self._write, self._layers_of = directory, write, layers_of
        self._shared = SharedReader()
        self._kept_version = 0
        self._arrived: dict[str, Bucket] = {}
        self._before: tuple[int, dict[str, Bucket]] | None = None
        self._whole = True

    def load(self, update: WeightUpdate) -> None:
        """Take over `update`'s weights: all of them, or, where anything fails, none.

        Raises:
            WeightTransferError: a tensor is damaged or lost; nothing was touched.
            Exception: whatever the engine raised; it holds again what it held before.
        """
        try:
            verify(update, self._shared)
            names = {entry.name for bucket in update.buckets for entry in bucket.entries}
            others = self._layers_of(names) - names
            if not self._whole:
                self._restore()
            try:
                self._whole = False
                self._write(self._with_layers(update, others), update.version)
                self._whole = True
            except Exception:
                self._restore()
                raise
            self._before = self._kept_version, self._arrived
            brought = {entry.name: bucket for bucket in update.buckets for entry in bucket.entries}
            self._arrived = self._arrived | brought
            self.version = self._kept_version = update.version
        finally:
            self._let_go()

    def receive(self, step: Callable[[], None], version: int, *, first: bool, last: bool) -> None:
        """A step of a transfer that goes past the object store: `version` is held after the `last` one.

        Nothing of it is kept, so where a step fails the engine goes back to the last version of which something is.
        """
        if first and not self._whole:
            self._restore()
        self._whole = False
        try:
            step()
        except Exception:
            self._restore()
            raise
        if last:
            self._whole, self.version, self._before = True, version, None

    def revert(self) -> None:
        """Go back to what was held before the last `load`; only until the engine was used since."""
        if self._before is None:
            raise StaleWeightsError(f"there is no version before policy version {self.version}")
        (self._kept_version, self._arrived), self._before = self._before, None
        self._restore()
        self._let_go()

    def restart(self, directory: Path) -> None:
        """Hold the weights of `directory`, a checkpoint of the same shape, as version 0."""
        self.forget()
        self._directory, self._kept_version = directory, 0
        self._restore()

    def forget(self) -> None:
        """Keep no update any more; the engine holds nothing usable until `restart`."""
        self._arrived, self._before, self._whole = {}, None, False
        self._let_go()

    def use(self, version: int) -> None:
        """Declare that the engine is about to be used at `version`; what was held before is let go.

        Raises:
            StaleWeightsError: another version is held, or nothing usable.
        """
        if not self._whole or self.version != version:
            state = f"version {self.version}" if self._whole else "nothing usable (a load failed half-way)"
            raise StaleWeightsError(f"policy version {version} was requested, but the generator holds {state}")
        self._before = None
        self._let_go()

    def _restore(self) -> None:
        self._whole = False
        self._write(self._held(), self._kept_version)
        self._whole, self.version = True, self._kept_version

    def _with_layers(self, update: WeightUpdate, others: set[str]) -> Tensors:
        for bucket in update.buckets:
            # Verified, and nobody may write there now.
            yield from unpack(bucket, self._shared, check=False)
        if others:
            yield from self._held(others)

    def _held(self, names: set[str] | None = None) -> Tensors:
        """The tensors held before an update (None: all of them)."""
        from safetensors import safe_open

        with safe_open(self._directory / WEIGHTS_FILE, framework="pt") as file:
            for name in sorted(file.keys()):
                if name not in self._arrived and (names is None or name in names):
                    yield name, file.get_tensor(name)
        for bucket in {id(bucket): bucket for bucket in self._arrived.values()}.values():
            for name, tensor in unpack(bucket, self._shared):
                if self._arrived[name] is bucket and (names is None or name in names):
                    yield name, tensor

    def _let_go(self) -> None:
        """Shared memory that is not needed to go back to may be written again."""
        before = {} if self._before is None else self._before[1]
        buckets = [*self._arrived.values(), *before.values()]
        self._shared.keep({bucket.ref for bucket in buckets if isinstance(bucket.ref, SharedBytes)})
