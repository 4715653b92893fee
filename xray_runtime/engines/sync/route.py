"""The route by which weights come from a trainer to a generator: through host memory, or from GPU to GPU.

Directly they go in the generator's own way, `ipc` on shared devices or `nccl`, in bfloat16 as the generator holds them.
There are no checksums then; PPO's `max_mismatch` checks that the generator computes the policy. After a broken transfer
the generator returns to the last version from the object store, or to its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from xray_runtime.engines.capabilities import Transport
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.plugs import unsupported


@dataclass(frozen=True)
class Device:
    """A Workhorse's device. `gpu` is the UUID of the physical device; None: CPU."""

    machine: str
    """See `shared_memory.machine`."""
    gpu: str | None = None


def choose(
    wanted: Literal["auto", "plasma", "nccl", "ipc"],
    config: GeneratorConfig,
    trainer: Sequence[Device],
    generator: Sequence[Device],
) -> Transport:
    """The transport of weights from `trainer`'s ranks to `generator`'s. Raises ValueError: `wanted` cannot work between
    these devices."""
    if wanted == "plasma":
        return "plasma"
    all_on_gpus = all(device.gpu is not None for device in [*trainer, *generator])
    trains, samples = {device.gpu for device in trainer}, {device.gpu for device in generator}
    possible: Transport = "plasma"
    direct = config.capabilities.transports
    if all_on_gpus and samples <= trains and "ipc" in direct:
        possible = "ipc"
    elif all_on_gpus and not samples & trains and "nccl" in direct:
        possible = "nccl"
    if wanted in ("auto", possible):
        return possible
    gpus = "the same GPUs" if wanted == "ipc" else "GPUs of their own"
    why = f"it needs generator and trainer on {gpus}; available here: {possible!r}"
    raise ValueError(
        unsupported(f"runtime.weight_transfer = {wanted!r}", f"generator.engine = {config.engine!r} here", why=why)
    )


def obstacle(trained: Set[str] | None, together: Set[str]) -> str | None:
    """Why a direct transfer would send wrong weights; None if they are right.

    Args:
        trained: names of the trained weights; None: no rank has all of them whole.
        together: `trained` and all other weights in the same layers of the generator's model.
    """
    if trained is None:
        return "the policy is split over tensor-parallel or pipeline-parallel ranks, and only its first rank sends"
    if lacking := together - trained:
        # The rest of such a layer would be left uninitialized.
        return f"{min(lacking)} is not trained, but the generator holds it in one layer with weights that are"
    return None


@dataclass(frozen=True)
class Route:
    """How weights come from a trainer to a generator."""

    engine: str
    """The generator."""
    transport: Transport
    shared: bool
    """Whether both are on one machine."""
    dtype: str | None
    """Precision in which `plasma` sends them; None: as they are."""
    adapter: bool = False
    """Whether they are those of an adapter, not merged."""


def choose_route(
    wanted: Literal["auto", "plasma", "nccl", "ipc"],
    config: GeneratorConfig,
    trainer: Sequence[Device],
    generator: Sequence[Device],
    names: Callable[[], tuple[Set[str] | None, Set[str]]],
) -> Route:
    """The route of weights from `trainer`'s ranks to `generator`'s; `names` finds the arguments of `obstacle`. Raises
    ValueError: `wanted` cannot work between these devices, or would send wrong weights."""
    transport = choose(wanted, config, trainer, generator)
    if transport != "plasma" and (why := obstacle(*names())):
        if wanted != "auto":
            raise ValueError(f"runtime.weight_transfer: {wanted!r} is not allowed: {why}; 'plasma' works")
        transport = "plasma"
    # Where the generator holds bfloat16, more would be sent in vain.
    half = config.precision("cuda" if all(device.gpu is not None for device in generator) else "cpu") == "bfloat16"
    on_one_machine = len({device.machine for device in [*trainer, *generator]}) == 1
    return Route(config.engine, transport, on_one_machine, "bfloat16" if half else None)
