"""Handles promise what their actors do: each call of a protocol is a method with the same parameters and result."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from xray_runtime.cluster import protocols
from xray_runtime.cluster.generator import Generator
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.pool.pool import PoolHandle, WorkerPool
from xray_runtime.cluster.pool.reservations import Reservations, ReservationsHandle
from xray_runtime.cluster.progress import ProgressActor, ProgressHandle
from xray_runtime.cluster.protocols import WholeModelHandle, WorkhorseHandle
from xray_runtime.cluster.whole_model import WholeModel

ACTORS: list[tuple[type, tuple[type, ...]]] = [
    (WholeModelHandle, (WholeModel,)),
    (WorkhorseHandle, (Learner, Generator)),
    (PoolHandle, (WorkerPool,)),
    (ReservationsHandle, (Reservations,)),
    (ProgressHandle, (ProgressActor,)),
]
WIDER = {"ModelSpec | GeneratorSpec": {"ModelSpec", "GeneratorSpec"}}
"""What a handle takes → what its actor says it takes: a caller never mixes the two kinds of models up."""


def promised(handle: type) -> dict[str, tuple[list[str], str] | None]:
    """Call → (types of its parameters, of its result) as they are written; None: whatever the method has."""
    calls: dict[str, tuple[list[str], str] | None] = {}
    annotations = {
        name: text for base in handle.__mro__ for name, text in vars(base).get("__annotations__", {}).items()
    }
    for name, text in annotations.items():
        written = ast.parse(text, mode="eval").body
        if isinstance(written, ast.Name):
            protocol: Any = getattr(protocols, written.id)
            if hasattr(protocol, "remote"):
                parameters, result = declared(protocol.remote)
                calls[name] = (parameters, result.removeprefix("Ref[").removesuffix("]"))
            continue
        assert isinstance(written, ast.Subscript)
        assert isinstance(written.slice, ast.Tuple)
        parameters_written, result_written = written.slice.elts
        if isinstance(parameters_written, ast.List):
            calls[name] = ([ast.unparse(p) for p in parameters_written.elts], ast.unparse(result_written))
        else:
            calls[name] = None
    return calls


def declared(method: Any) -> tuple[list[str], str]:
    """(types of the parameters but `self`, of the result) as they are written."""
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()
    return [str(parameter.annotation) for parameter in parameters], str(signature.return_annotation)


@pytest.mark.parametrize(("handle", "actors"), ACTORS, ids=[handle.__name__ for handle, _ in ACTORS])
def test_a_handle_has_the_calls_of_its_actor(handle: type, actors: tuple[type, ...]) -> None:
    calls = promised(handle)
    assert len(calls) >= 4
    for name, call in calls.items():
        methods = [getattr(actor, name) for actor in actors if hasattr(actor, name)]
        assert methods, name
        for method in methods if call is not None else ():
            parameters, result = declared(method)
            assert result == call[1], name
            assert len(parameters) == len(call[0]), name
            for wanted, written in zip(call[0], parameters, strict=True):
                assert written == wanted or written in WIDER.get(wanted, ()), name
