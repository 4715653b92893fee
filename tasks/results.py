"""Where the results of stages lie between runs: files that whoever can write to the store may have written.

Prefect lets a result file name what decodes it, pickle and any function that can be imported among the choices, and
reads it whenever a stage with its key is asked for. Only a file that plain JSON decodes is let through.
"""

from __future__ import annotations

import json
from typing import Any, cast

from prefect.filesystems import LocalFileSystem
from prefect.serializers import JSONSerializer

PLAIN = JSONSerializer(object_encoder=None, object_decoder=None)
"""JSON without Prefect's additions, by which a text can name a class to import and build."""
_SERIALIZER = PLAIN.model_dump(mode="json")


class PlainResults(LocalFileSystem):
    """A directory of result files. What is none reads as if it could not be read, and its stage is asked anew."""

    # Without a name of its own Prefect takes it for its own LocalFileSystem, and says so at every start.
    _block_type_name = "X-ray results"

    def read_path(self, path: str, **options: Any) -> bytes:  # type: ignore[override]
        """Raises ValueError where there is no file, or none that `PLAIN` wrote."""
        # Prefect asks for it without waiting: `_sync` is among the options.
        return _checked(path, cast(bytes, super().read_path(path, **options)))

    async def aread_path(self, path: str) -> bytes:
        """As `read_path`."""
        return _checked(path, await super().aread_path(path))


def _checked(path: str, content: bytes) -> bytes:
    try:
        record = json.loads(content)
        plain = record.keys() == {"metadata", "result"} and record["metadata"]["serializer"] == _SERIALIZER
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        plain = False
    if not plain:
        raise ValueError(f"{path}: not a result of ours")
    # What was looked at is what is decoded: of a key that stands twice another reader might take the first.
    return json.dumps(record).encode()
