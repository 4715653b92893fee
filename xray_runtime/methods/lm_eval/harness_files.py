"""Tasks of the lm-evaluation-harness on disk: reads a directory without running its code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Values of `dataset_path` that read files; all others are names on the hub."""
CODE = ("custom_dataset", "unsafe_code", "class")
GROUP_FIELDS = {"group", "group_alias", "task", "aggregate_metric_list", "metadata"}


@dataclass(frozen=True)
class HarnessTasks:
    """One task, or a group and its members; data files have absolute paths."""

    name: str
    """Name of the task, or of the group with all others."""
    tasks: Mapping[str, dict[str, Any]]
    groups: Mapping[str, dict[str, Any]]

    @property
    def samples_replies(self) -> bool:
        """Whether a task samples replies."""
        return "generate_until" in self._outputs

    @property
    def scores(self) -> bool:
        """Whether a task scores likelihoods."""
        return bool(self._outputs - {"generate_until"})

    @property
    def _outputs(self) -> set[str]:
        return {task.get("output_type", "generate_until") for task in self.tasks.values()}

    def write(self, directory: Path, cache: Path) -> None:
        """Write one file per task for the harness, which stores processed data in `cache`."""
        options = {"cache_dir": str(cache)}
        tasks = [task | {"dataset_kwargs": task["dataset_kwargs"] | options} for task in self.tasks.values()]
        for number, content in enumerate([*tasks, *self.groups.values()]):
            (directory / f"{number}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def read_tasks(directory: Path, field: str) -> HarnessTasks:
    """The .yaml files in `directory`, with their includes; errors begin with the config's `field`.

    Raises:
        ValueError: it is not a single task or group, calls code, or its data are not files in the directory.
    """
    try:
        return _read(directory)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _read(directory: Path) -> HarnessTasks:
    tasks: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    included: set[Path] = set()
    contents = {path: _content(path, directory, included, ()) for path in sorted(directory.glob("*.yaml"))}
    if not contents:
        raise ValueError(f"{str(directory)!r} must be a directory with the .yaml of a task; it has none")
    for path, content in contents.items():
        if "group" in content:
            _check_group(content, path.name)
            name, named = content["group"], groups
        elif isinstance(content.get("task"), str):
            name, named = content["task"], tasks
            content["dataset_kwargs"] = {"data_files": _data_files(content, directory, path.name)}
        elif path.resolve() in included:
            continue
        else:
            raise ValueError(f"{path.name} must name its `task`")
        if name in tasks or name in groups:
            raise ValueError(f"{path.name} has the same name as another: {name!r}")
        named[name] = content
    for name, group in groups.items():
        # Always a list: the harness ignores a single value.
        group["task"] = list(_members(name, group, tasks, groups))
    for task in tasks.values():
        # Groups name its members now; the harness drops a group that has a tag's name.
        task.pop("tag", None)
    return HarnessTasks(_whole(tasks, groups), tasks, groups)


def _content(path: Path, directory: Path, included: set[Path], within: Sequence[Path]) -> dict[str, Any]:
    """A file's content, merged over its includes."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        # This includes the tag `!function`.
        raise ValueError(f"{path.name} cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must name its `task`")
    found: dict[str, Any] = {}
    for name in _listed(content.pop("include", None)):
        other = Path(_inside(name, directory, "included"))
        if other in (*within, path.resolve()):
            raise ValueError(f"{path.name} includes itself, by {name!r}")
        included.add(other)
        found |= _content(other, directory, included, (*within, path.resolve()))
    return found | content


def _data_files(task: Mapping[str, Any], directory: Path, name: str) -> Any:
    for code in CODE:
        if code in task:
            raise ValueError(f"`{code}` in {name} is not allowed: tasks may not run code")
    if task.get("dataset_path") not in FORMATS:
        raise ValueError(
            f"dataset_path {task.get('dataset_path')!r} in {name} is not allowed: must be one of {', '.join(FORMATS)}, "
            "with data_files in the task's directory; nothing is downloaded"
        )
    given = task.get("dataset_kwargs") or {}
    if not isinstance(given, dict) or set(given) != {"data_files"}:
        raise ValueError(f"dataset_kwargs in {name} must have data_files and nothing else")
    return _each_inside(given["data_files"], directory)


def _each_inside(files: Any, directory: Path) -> Any:
    if isinstance(files, dict):
        return {split: _each_inside(of, directory) for split, of in files.items()}
    if isinstance(files, list):
        return [_each_inside(of, directory) for of in files]
    return _inside(files, directory, "data")


def _inside(file: Any, directory: Path, what: str) -> str:
    path = (directory / str(file)).resolve()
    if not path.is_relative_to(directory.resolve()) or not path.is_file():
        raise ValueError(f"{what} file {str(file)!r} is not in the task's directory")
    return str(path)


def _check_group(group: Mapping[str, Any], name: str) -> None:
    if not isinstance(group["group"], str):
        raise ValueError(f"{name} must name its `group`, not {group['group']!r}")
    for other in sorted(set(group) - GROUP_FIELDS):
        raise ValueError(f"`{other}` in {name} is not allowed: a group may only list its tasks, not change them")
    for member in _listed(group.get("task")):
        if not isinstance(member, str):
            raise ValueError(f"`task` in {name} must name tasks, groups or tags of the directory, not {member!r}")


def _whole(tasks: Mapping[str, Any], groups: Mapping[str, dict[str, Any]]) -> str:
    """The task or group that contains all others."""
    parts = {name: group["task"] for name, group in groups.items()}
    try:
        TopologicalSorter(parts).prepare()
    except CycleError as error:
        raise ValueError(f"the group {error.args[1][0]!r} contains itself") from None
    tops = sorted({*tasks, *groups}.difference(*parts.values()))
    if len(tops) != 1:
        raise ValueError(f"must hold one task, or one group with all others; it has {', '.join(tops)}")
    [top] = tops
    if top in groups and not groups[top].get("aggregate_metric_list"):
        raise ValueError(
            f"the group {top!r} must have an aggregate_metric_list: how the scores of its tasks are combined"
        )
    return top


def _members(
    name: str, group: Mapping[str, Any], tasks: Mapping[str, Mapping[str, Any]], groups: Mapping[str, Any]
) -> Iterator[str]:
    tagged: dict[str, list[str]] = {}
    for task, content in tasks.items():
        for tag in _listed(content.get("tag")):
            tagged.setdefault(tag, []).append(task)
    for member in _listed(group.get("task")):
        if member in tasks or member in groups:
            yield member
        elif member in tagged:
            yield from tagged[member]
        else:
            raise ValueError(f"the group {name!r} names {member!r}, which is not a task, group or tag of the directory")


def _listed(value: Any) -> list[Any]:
    """A value, a list of values or nothing, as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
