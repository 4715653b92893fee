"""The stage kind `base`: a model by name."""

from __future__ import annotations

from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.models.config import HubModel


class HubBase(HubModel):
    """All fields of the stage kind `base`."""

    generator: GeneratorConfig | None = None
    """The engine that samples later; it is tried here on a family that was not tried before, also with other weights,
    in a copy of the files that is then removed, so that nothing is trained that it cannot sample from. None: no
    trial."""
