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

from xray import configs
from xray_runtime.config.loading import read_mapping

CONFIGS = Path(configs.__file__).parent
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
DESCRIPTIONS = {
    "lifecycle": "Data to registered policy, every night; unchanged stages come from the cache.",
    "lifecycle-tiny": "The smallest complete lifecycle, to check that everything works.",
    "flywheel": "What people said since the last night becomes a candidate; a person promotes it.",
    "tune": "Search over fields of a config. Each trial is a lifecycle; shared stages are computed once.",
    "audit": "Check every byte, record and alias; fails, with an event, if one was changed.",
    "plan": "Show where the models of a config would run, and what memory they need.",
    "promote": "Make the candidate champion if it passes and a person approves on the run's page.",
    "rollback": "Make the previous champion the champion again.",
    "export": "Write a checkpoint, its ancestors, their records and the public key to one archive.",
    "prune": "List checkpoints that nothing needs any more; with `remove`, delete them.",
}


def deployments(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every deployment, as an entry of prefect.yaml; `values`: those of VARIABLES."""
    quickstart = {"config": read_mapping(CONFIGS / "quickstart.yaml")}
    search = {"name": "quickstart-ppo"} | read_mapping(CONFIGS / "search" / "quickstart-ppo.yaml")
    tiny = {"config": read_mapping(CONFIGS / "tiny.yaml")}
    output = {"output": f"{values['XRAY_HOME']}/output"}
    model = f"{quickstart['config']['project']}-policy"
    variables = {name: values[name] for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}

    def deployment(
        name: str,
        parameters: dict[str, Any],
        *tags: str,
        flow: str = "",
        queue: str | None = None,
        schedule: tuple[str, str] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """`schedule`: (slug, cron)."""
        flow = flow or f"{name}.{name}"
        pool: dict[str, Any] = {"name": POOL, "job_variables": {"env": variables, "working_dir": values["XRAY_HOME"]}}
        if queue is not None:
            pool["work_queue_name"] = queue
        if schedule is not None:
            more["schedules"] = [{"slug": schedule[0], "cron": schedule[1], "timezone": values["XRAY_TIMEZONE"]}]
        return {
            "name": name,
            "description": DESCRIPTIONS[name],
            "entrypoint": f"xray.flows.{flow}",
            "tags": ["xray", flow.rpartition(".")[2], *tags],
            "work_pool": pool,
            "parameters": parameters,
        } | more

    only_one = {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    return [
        deployment("lifecycle", output | quickstart, queue=QUEUE, schedule=("nightly", "0 2 * * *")),
        deployment("lifecycle-tiny", output | tiny, "try", flow="lifecycle.lifecycle", queue=QUEUE),
        deployment("flywheel", output | {"config": {"dpo": {}}}, queue=QUEUE, schedule=("nightly", "0 4 * * *")),
        deployment("tune", output | quickstart | {"search": search}, queue=QUEUE),
        deployment("audit", output, schedule=("hourly", "17 * * * *"), concurrency_limit=only_one),
        deployment("plan", quickstart),
        deployment("promote", output | {"name": model}),
        deployment("rollback", output | {"name": model}, flow="promote.rollback"),
        deployment("export", output | {"reference": f"{model}@candidate"}),
        deployment("prune", output),
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
