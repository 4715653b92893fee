"""Names on the Hugging Face hub: whether it can be reached, and the commit of a name."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.network import unreachable
from xray_runtime.kernel.store.location import PACKAGED_MODELS

ANSWER_S = 60.0
HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?")
PACKAGED_DATA = {"chitchat": "chitchat_dataset"}
"""Data sources in an installed package."""
FILES = frozenset(
    {".jsonl", ".parquet", ".gguf", ".safetensors", ".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".jinja"}
)
"""Suffixes of files, which the hub is not asked for."""

Holds = Literal["model", "dataset"]


class OutsideError(ConfigError):
    """Something that a config names cannot be found or read; one line that names the field."""


def is_hub_name(value: str) -> bool:
    """Whether `value`, which is not a file or directory, may be a name on a hub."""
    return bool(HUB_NAME.fullmatch(value)) and not value.startswith(".") and Path(value).suffix not in FILES


@lru_cache(maxsize=64)
def check_on_hub(value: str, field: str, holds: Holds) -> None:
    """Check before anything is computed that a name is on the hub, or in its cache where HF_HUB_OFFLINE is set. Raises
    OutsideError: it is not there, or the hub cannot be reached; one line."""
    from huggingface_hub import constants

    packaged = PACKAGED_MODELS if holds == "model" else PACKAGED_DATA
    if value in packaged or Path(value).exists() or not is_hub_name(value):
        return
    reason = None if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if reason is not None:
        raise OutsideError(
            f"{field}: {value!r}: cannot reach the Hugging Face hub ({reason}); give a directory, or set "
            "HF_HUB_OFFLINE=1 with a cached copy"
        )
    commit(value, field, holds)


def commit(name: str, field: str, holds: Holds) -> str:
    """The commit of a hub name: from the hub, or if it cannot be asked, of the last download. Raises OutsideError: the
    hub has no such name, or cannot be asked and nothing was downloaded."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    hub: Any = HfApi()
    try:
        reason = None if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
        if reason is None:
            info = (hub.model_info if holds == "model" else hub.dataset_info)(name, timeout=ANSWER_S)
            if info.sha:
                return str(info.sha)
            reason = "the hub names no commit"
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise OutsideError(
            f"{field}: {name!r} is neither a file nor a directory, and the hub has no such {holds} "
            f"({first_line(error)})"
        ) from error
    except Exception as error:  # each transport below the hub's client has its own exceptions
        reason = first_line(error)
    folder = "--".join([f"{holds}s", *name.split("/")])
    main = Path(constants.HF_HUB_CACHE) / folder / "refs" / "main"
    try:
        return main.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise OutsideError(
            f"{field}: {name!r} cannot be looked up on the hub ({reason}) and was not downloaded before"
        ) from error
