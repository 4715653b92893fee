"""Counting and ending processes."""

from __future__ import annotations

import subprocess
import time

import psutil
import pytest

from xray.deployments.local_ray import is_dead
from xray_runtime.agents import process_tree


def test_descendants_come_after_their_parents_however_deep() -> None:
    assert list(process_tree.descendants({1: [2, 3], 3: [4], 5: [6]}, 1)) == [2, 3, 4]
    chain = {pid: [pid + 1] for pid in range(5000)}
    assert list(process_tree.descendants(chain, 0)) == list(range(1, 5001))


def test_many_trees_end_by_few_lists_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list for each tree took 20 s of an agent that forks, in which no other agent got an answer."""
    lists, children = [], process_tree.children
    monkeypatch.setattr(process_tree, "children", lambda: lists.append(1) or children())
    trees = [subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"]) for _ in range(20)]
    while len(pids := process_tree._below([tree.pid for tree in trees])) < 40:
        time.sleep(0.01)
    below = [psutil.Process(pid) for pid in pids]
    lists.clear()
    process_tree.kill_trees([tree.pid for tree in trees])
    assert [tree.wait() for tree in trees] == [-9] * 20
    assert len(lists) <= 3
    while not all(is_dead(process) for process in below):
        time.sleep(0.01)
