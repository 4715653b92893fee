"""The deployments of X-ray's flows that `xray up` installs, built from the configs in `configs/`.

For `prefect deploy` on a server of your own, write them to a file and set the variables that VARIABLES names:

    python -m xray.deployments.presets > prefect.yaml
    prefect deploy --all --prefect-file prefect.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from xray_runtime.config.loading import read_mapping

CONFIGS = Path(__file__).parent / "configs"
POOL = "xray"
QUEUE = "ray"
"""The work queue of long computations, one at a time. Short flows run in the pool's default queue."""
SUSPENDED = "Suspended by X-ray:"
"""Start of the message of a run that X-ray resumes by itself, unlike one that waits for a person."""
NO_HEARTBEAT = "No heartbeat: its process is gone."
"""Message of the state of a run that Prefect found lost."""
VARIABLES = {
    "XRAY_HOME": "directory of output/; flow runs work in it",
    "RAY_ADDRESS": "the Ray that stages run on",
    "MLFLOW_TRACKING_URI": "where runs and models are recorded; without a login, since Prefect keeps and shows it",
    "XRAY_TIMEZONE": "time zone of the schedules, such as Europe/Berlin",
}


def deployments(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every deployment, as an entry of prefect.yaml.

    Args:
        values: of VARIABLES.
    """
    variables = {name: values[name] for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    job = {"env": variables, "working_dir": values["XRAY_HOME"]}
    at_once = {"name": POOL, "job_variables": job}
    one_at_a_time = at_once | {"work_queue_name": QUEUE}

    def deployment(
        name: str,
        description: str,
        parameters: dict[str, Any],
        *tags: str,
        flow: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        flow = flow or f"{name}.{name}"
        return {
            "name": name,
            "description": description,
            "entrypoint": f"xray.flows.{flow}",
            "tags": ["xray", flow.rpartition(".")[2], *tags],
            "work_pool": at_once,
            "parameters": parameters,
        } | more

    def schedule(slug: str, cron: str) -> list[dict[str, Any]]:
        return [{"slug": slug, "cron": cron, "timezone": values["XRAY_TIMEZONE"]}]

    quickstart = {"config": read_mapping(CONFIGS / "quickstart.yaml")}
    search = {"name": "quickstart-ppo"} | read_mapping(CONFIGS / "search" / "quickstart-ppo.yaml")
    here = {"output": f"{values['XRAY_HOME']}/output"}
    name = f"{quickstart['config']['project']}-policy"
    return [
        deployment(
            "lifecycle",
            "Data to registered policy, every night; unchanged stages come from the cache.",
            here | quickstart,
            work_pool=one_at_a_time,
            schedules=schedule("nightly", "0 2 * * *"),
        ),
        deployment(
            "lifecycle-tiny",
            "The smallest complete lifecycle, to check that everything works.",
            here | {"config": read_mapping(CONFIGS / "tiny.yaml")},
            "try",
            flow="lifecycle.lifecycle",
            work_pool=one_at_a_time,
        ),
        deployment(
            "tune",
            "Search over fields of a config. Each trial is a lifecycle; shared stages are computed once.",
            here | quickstart | {"search": search},
            work_pool=one_at_a_time,
        ),
        deployment(
            "audit",
            "Check every byte, record and alias; fails, with an event, if one was changed.",
            here,
            concurrency_limit={"limit": 1, "collision_strategy": "CANCEL_NEW"},
            schedules=schedule("hourly", "17 * * * *"),
        ),
        deployment("plan", "Show where the models of a config would run, and what memory they need.", quickstart),
        deployment(
            "promote",
            "Make the candidate champion if it passes and a person approves on the run's page.",
            here | {"name": name},
        ),
        deployment(
            "rollback",
            "Make the previous champion the champion again.",
            here | {"name": name},
            flow="promote.rollback",
        ),
        deployment(
            "export",
            "Write a checkpoint, its ancestors, their records and the public key to one archive.",
            here | {"reference": f"{name}@candidate"},
        ),
        deployment("prune", "List checkpoints that nothing needs any more; with `remove`, delete them.", here),
    ]


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
