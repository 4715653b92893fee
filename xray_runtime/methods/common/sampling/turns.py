"""Turns of a generator and of trained models that share GPUs.

A sync comes before the turn, while the trained models are awake. It wakes the generator's weights alone: its cache
wakes when the trained models sleep (as verl and slime do it with vLLM).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from xray_runtime.cluster.protocols import ModelHandle, get, get_all
from xray_runtime.kernel.config.section import RuntimeConfig


def trained_models(models: Mapping[str, ModelHandle]) -> dict[str, ModelHandle]:
    """Those of a `ppo` stage."""
    return {role: models[role] for role in ("policy", "critic") if role in models}


@contextmanager
def sampling_turn(
    runtime: RuntimeConfig, generator: ModelHandle, trained: Collection[ModelHandle] = (), *, synced_next: bool = False
) -> Iterator[None]:
    """Let `generator` sample any number of times, awake until the end with `runtime.generator_sleeps`; the `trained`
    models sleep meanwhile with `runtime.trainer_sleeps`.

    Args:
        synced_next: the generator gets new weights before it samples again, so these need not be kept.
    """
    sleeping = trained if runtime.trainer_sleeps else ()
    get_all([model.sleep.remote() for model in sleeping])
    if runtime.generator_sleeps:
        get(generator.wake_up.remote())
    yield
    if runtime.generator_sleeps:
        get(generator.sleep.remote(synced_next))
    get_all([model.wake_up.remote() for model in sleeping])
