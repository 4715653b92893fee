"""The architecture that a server's model and a stage's must have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from xray_runtime.kernel.store.location import NO_CODE
from xray_runtime.models.weight_files import weight_files

SAME_RESULTS = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Fields of a `config.json` that do not change what is computed; neither do ids of tokens."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model without its weights."""

    config: dict[str, Any]
    """`config.json` as transformers reads it, without `SAME_RESULTS`."""
    shapes: dict[str, list[int]]
    """Tensor → its shape."""


def architecture(directory: Path) -> Architecture:
    """The architecture of a checkpoint in Hugging Face form."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, **NO_CODE).to_dict()
    kept = {
        name: value for name, value in config.items() if name not in SAME_RESULTS and not name.endswith("_token_id")
    }
    shapes = {}
    for name, file in weight_files(directory).items():
        with safe_open(file, framework="pt") as opened:
            shapes[name] = list(opened.get_slice(name).get_shape())
    # As it arrives from a server: without tuples, and with texts as keys.
    return Architecture(config=json.loads(json.dumps(kept)), shapes=shapes)


def difference(theirs: Architecture, ours: Architecture) -> str | None:
    """The first field or tensor that differs; None: all are the same."""
    for what, there, here in (("config.json", theirs.config, ours.config), ("weights", theirs.shapes, ours.shapes)):
        for name in sorted(there.keys() | here.keys()):
            if (found := there.get(name)) != (wanted := here.get(name)):
                return f"{name} of its {what} is {found!r}, and {wanted!r} of the stage's model"
    return None
