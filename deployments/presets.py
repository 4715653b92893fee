"""The deployments of X-ray's flows that `xray up` installs, built from the configs in `configs/`.

For `prefect deploy` on a server of your own, write them to a file and set the variables that VARIABLES names:

    python -m xray.deployments.presets > prefect.yaml
    prefect deploy --all --prefect-file prefect.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from xray import configs
from xray.deployments.names import POOL, QUEUE
from xray_runtime.kernel.config.extras import missing_packages
from xray_runtime.kernel.config.loading import read_mapping

CONFIGS = Path(configs.__file__).parent
VARIABLES = {
    "XRAY_HOME": "directory of output/; flow runs work in it",
    "RAY_ADDRESS": "the Ray that stages run on",
    "MLFLOW_TRACKING_URI": "where runs and models are recorded; without a login, since Prefect keeps and shows it",
    "XRAY_TIMEZONE": "time zone of the schedules, such as Europe/Berlin",
}


@dataclass(frozen=True)
class Deployment:
    """A flow with parameters. Other packages add theirs as entry points of the group `xray.deployments`."""

    name: str
    flow: str
    """`package.module.function`."""
    description: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    _: KW_ONLY
    has_output: bool = True
    """Whether the flow takes the output directory of `xray up`, as `output`."""
    tags: tuple[str, ...] = ()
    queue: str | None = None
    schedule: tuple[str, str] | None = None
    """(slug, cron)."""
    one_at_a_time: bool = False
    extra: str | None = None
    """The extra whose packages the flow needs; without them it is not deployed."""

    def entry(self, values: Mapping[str, str]) -> dict[str, Any]:
        """The entry of prefect.yaml; `values`: those of VARIABLES."""
        variables = {name: values[name] for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
        pool: dict[str, Any] = {"name": POOL, "job_variables": {"env": variables, "working_dir": values["XRAY_HOME"]}}
        if self.queue is not None:
            pool["work_queue_name"] = self.queue
        output = {"output": f"{values['XRAY_HOME']}/output"} if self.has_output else {}
        entry: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "entrypoint": self.flow,
            "tags": ["xray", self.flow.rpartition(".")[2], *self.tags],
            "work_pool": pool,
            "parameters": {**output, **self.parameters},
        }
        if self.schedule is not None:
            slug, cron = self.schedule
            entry["schedules"] = [{"slug": slug, "cron": cron, "timezone": values["XRAY_TIMEZONE"]}]
        if self.one_at_a_time:
            entry["concurrency_limit"] = {"limit": 1, "collision_strategy": "CANCEL_NEW"}
        return entry


def trainings() -> list[Deployment]:
    """X-ray's own that train, one at a time."""
    quickstart = {"config": read_mapping(CONFIGS / "quickstart.yaml")}
    search = {"name": "quickstart-ppo"} | read_mapping(CONFIGS / "search" / "quickstart-ppo.yaml")
    return [
        Deployment(
            "lifecycle",
            "xray.flows.lifecycle.lifecycle",
            "From data to a registered policy, every night; unchanged stages come from the cache.",
            quickstart,
            queue=QUEUE,
            schedule=("nightly", "0 2 * * *"),
        ),
        Deployment(
            "lifecycle-tiny",
            "xray.flows.lifecycle.lifecycle",
            "The smallest complete lifecycle, to check that everything works.",
            {"config": read_mapping(CONFIGS / "tiny.yaml")},
            tags=("try",),
            queue=QUEUE,
        ),
        Deployment(
            "flywheel",
            "xray.flows.flywheel.flywheel",
            "Make a candidate from the feedback since the last cycle; a person promotes it.",
            {"config": {"dpo": {}}},
            queue=QUEUE,
            schedule=("nightly", "0 4 * * *"),
        ),
        Deployment(
            "tune",
            "xray.flows.tune.tune",
            "Search over fields of a config. Each trial is a lifecycle; shared stages are computed once.",
            quickstart | {"search": search},
            queue=QUEUE,
            extra="ops",
        ),
    ]


def short_flows() -> list[Deployment]:
    """X-ray's own that take minutes at most."""
    config = read_mapping(CONFIGS / "quickstart.yaml")
    model = f"{config['project']}-policy"
    return [
        Deployment(
            "audit",
            "xray.flows.audit.audit",
            "Check every byte, record and alias; fails, with an event, if one was changed.",
            schedule=("hourly", "17 * * * *"),
            one_at_a_time=True,
        ),
        Deployment(
            "plan",
            "xray.flows.plan.plan",
            "Show where the models of a config would run, and what memory they need.",
            {"config": config},
            has_output=False,
        ),
        Deployment(
            "promote",
            "xray.flows.promote.promote",
            "Make the candidate champion if it passes and a person approves on the run's page.",
            {"name": model},
        ),
        Deployment(
            "rollback", "xray.flows.promote.rollback", "Make the previous champion the champion again.", {"name": model}
        ),
        Deployment(
            "export",
            "xray.flows.export.export",
            "Write a checkpoint, its ancestors, their records and the public key to one archive.",
            {"reference": f"{model}@candidate"},
        ),
        Deployment(
            "prune",
            "xray.flows.prune.prune",
            "List checkpoints that nothing needs any more; with `remove`, delete them.",
        ),
    ]


def deployments(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every deployment, as an entry of prefect.yaml. Raises ValueError: two have one name."""
    by_name: dict[str, Deployment] = {}
    for each in (*trainings(), *short_flows(), *(point.load() for point in entry_points(group="xray.deployments"))):
        if each.name in by_name:
            raise ValueError(f"deployment {each.name!r} is defined twice: {by_name[each.name].flow}, {each.flow}")
        by_name[each.name] = each
    return [each.entry(values) for each in by_name.values() if each.extra is None or not missing_packages(each.extra)]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml() -> str:
    """The text of prefect.yaml; Prefect fills in the variables when it deploys."""
    values = {name: f"{{{{ ${name} }}}}" for name in VARIABLES}
    head = [
        "# Written by `python -m xray.deployments.presets`. With the variables below set:",
        f"#   prefect work-queue create {QUEUE} --pool {POOL} --limit 1",
        "#   prefect deploy --all --prefect-file prefect.yaml",
        *(f"#   {name:20} {meaning}" for name, meaning in VARIABLES.items()),
    ]
    # By default `prefect deploy` would add a step with the current directory.
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": values["XRAY_HOME"]}}]
    content = {"pull": pull, "deployments": deployments(values)}
    return "\n".join([*head, yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120)])


if __name__ == "__main__":
    sys.stdout.write(as_yaml())
