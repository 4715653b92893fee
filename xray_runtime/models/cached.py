"""Properties that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """`functools.cached_property` without its lock.

    Before Python 3.12 one lock serves all objects of a class, so the passes of two micro-batches would follow one
    another (`engines.threads`). Threads that first ask the same object may both compute.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        self.func = func

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self.func(instance)
        return value
