"""The key of what a model computed, kept beside its dataset."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.store.identity import digest, environment_digest

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage


def computed_key(stage: Stage[Any, Any], layout: Set[str], **content: Any) -> str:
    """The key of a model's outputs: a digest of `content` and of everything else that changes their last bits, with the
    fields `layout` of the stage's config."""
    config = stage.config.model_dump(mode="json", include=layout)
    runtime = list(stage.runtime.in_keys().values())
    return digest({**content, "layout": config, "runtime": runtime, "software": environment_digest()})[:32]
