"""Errors that cannot be pickled arrive with their type and cause, and refusals among them are not retried."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from xray_runtime.cluster.plain_errors import plain, plain_errors
from xray_runtime.kernel.errors import first_line, is_out_of_memory, may_retry


@dataclass(config=ConfigDict(arbitrary_types_allowed=True))
class EngineConfig:
    """As vLLM's configs are: its errors hold the call's `ArgsKwargs`, which nothing can pickle."""

    cache: bool
    lock: Any = None

    @model_validator(mode="after")
    def _allowed(self) -> Any:
        raise ValueError("prefix caching is\nnot supported")


class Holder(BaseModel):
    size: int


class TwoPartsError(ValueError):
    """Its reconstruction from `args` fails."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}\nand much more")
        self.field = field


class LockedError(RuntimeError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class FullError(MemoryError):
    def __init__(self, text: str, *, at: object) -> None:
        super().__init__(text)
        self.at = at


def of_vllm() -> Exception:
    with pytest.raises(ValueError, match="prefix caching") as caught:
        EngineConfig(cache=True, lock=threading.Lock())
    return caught.value


def of_fields() -> Exception:
    with pytest.raises(ValueError, match="size") as caught:
        Holder.model_validate({"size": threading.Lock()})
    return caught.value


@plain_errors
class Actor:
    def fail(self, error: Exception) -> None:
        """Fails."""
        raise error


@pytest.mark.parametrize(
    ("error", "message", "retry"),
    [
        (of_vllm(), "ValidationError: prefix caching is not supported", False),
        (of_fields(), "ValidationError: size: Input should be a valid integer", False),
        (TwoPartsError("model", "unknown"), "TwoPartsError: model: unknown", False),
        (LockedError("lost a lock"), "LockedError: lost a lock", True),
        (FullError("no room", at=threading.Lock()), "FullError: no room", True),
        (LockedError(""), "LockedError: LockedError", True),
    ],
    ids=["pydantic's, of a call", "pydantic's, of a field", "two arguments", "a lock", "memory", "no text"],
)
def test_unpicklable_errors_arrive_in_one_line(error: Exception, message: str, retry: bool) -> None:
    error.add_note("in rank 3")
    with pytest.raises((ValueError, RuntimeError, MemoryError)) as caught:
        Actor().fail(error)
    found = caught.value
    assert (type(found) in (ValueError, RuntimeError, MemoryError), str(found)) == (True, message)
    assert (may_retry(found), found.__notes__) == (retry, ["in rank 3"])
    assert is_out_of_memory(found) == isinstance(error, MemoryError)
    assert first_line(found) == message


@pytest.mark.parametrize("error", [ValueError("lr: too large"), KeyError("x"), OSError(2, "gone", "file")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert plain(error) is error
    with pytest.raises(type(error)) as caught:
        Actor().fail(error)
    assert caught.value is error


def test_methods_keep_their_names() -> None:
    assert (Actor.fail.__name__, Actor.fail.__doc__) == ("fail", "Fails.")
