"""The servers that a worker's request passes through before it is forked."""

from __future__ import annotations

import os

import pytest

from xray.deployments.fork_server import WorkerRequest

FIRST, LATER = "ray-11-01000000", "ray-22-01000000"


def request(libraries: str, raylet: str, *arguments: str) -> WorkerRequest:
    environment = {"RAY_RAYLET_PID": raylet, "RAY_JOB_ID": "01000000"}
    return WorkerRequest(libraries, list(arguments), environment, os.getcwd(), output=[])


@pytest.mark.parametrize(
    ("libraries", "raylet", "path"),
    [
        ("", "11", (FIRST,)),
        ("", "22", (LATER,)),
        ("trainer:deepspeed", "11", ("torch", FIRST, "trainer:deepspeed")),
        # Libraries are kept for the next Ray.
        ("trainer:deepspeed", "22", ("torch-again", "trainer:deepspeed", LATER)),
        ("stage", "11", ("torch", FIRST, "stage")),
        # Those of stages import Ray, so they cannot come before it.
        ("stage", "22", ("torch-again", LATER, "stage")),
    ],
)
def test_ray_is_imported_for_the_cluster_of_the_worker(libraries: str, raylet: str, path: tuple[str, ...]) -> None:
    assert request(libraries, raylet, "default_worker.py").path(FIRST) == path


def test_torch_can_be_loaded_before_any_ray_is_known() -> None:
    assert WorkerRequest("", [], {}, os.getcwd(), output=[]).path("") == ("torch",)


def test_torch_is_loaded_again_for_a_later_ray() -> None:
    """The first one's process has become that Ray's."""
    assert WorkerRequest("", [], {}, os.getcwd(), output=[]).path(FIRST) == ("torch-again",)
