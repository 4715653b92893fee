"""The form of a run on Prefect's page: few fields are drawn, all are validated."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid_schema, validate

from xray.deployments.installation import FIRST, with_first_fields
from xray.flows.lifecycle import lifecycle
from xray.flows.plan import plan
from xray_runtime.kernel.config.loading import read_mapping

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module")
def form() -> dict[str, Any]:
    return with_first_fields(parameter_schema(lifecycle).model_dump(exclude_unset=True))


def refused(form: dict[str, Any], config: dict[str, Any]) -> bool:
    return bool(validate({"config": config, "output": "o"}, deepcopy(form)))


def test_ten_fields_are_drawn_in_order(form: dict[str, Any]) -> None:
    is_valid_schema(deepcopy(form))
    sections = set(FIRST) - {"LifecycleConfig"}
    drawn = [field for section, fields in FIRST.items() for field in fields]
    # A section that is drawn holds fields that are drawn; PPO's hold its stages.
    leaves = [field for field in drawn if field not in ("data", "sft", "ppo", "stages", "evaluate", "kl")]
    assert len(leaves) == 10
    config = form["definitions"]["LifecycleConfig"]
    assert list(config["properties"]) == list(FIRST["LifecycleConfig"])
    assert [field["position"] for field in config["properties"].values()] == list(range(7))
    assert "Use JSON input" in config["description"]
    assert all(set(form["definitions"][name]["properties"]) == set(FIRST[name]) for name in sections)


@pytest.mark.parametrize("preset", ["tiny", "quickstart", "grpo", "dpo", "ratings", "smollm2"])
def test_every_config_is_accepted(form: dict[str, Any], preset: str) -> None:
    assert not refused(form, read_mapping(CONFIGS / f"{preset}.yaml"))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1},
        {"no_such_field": 1},
        # Fields that are not drawn.
        {"max_failed": 2},
        {"runtime": {"retries": -1}},
        {"data": {"max_chars": "long"}},
        {"data": {"no_such_field": 1}},
        {"ppo": {"stages": [{"gamma": 7}]}},
        {"evaluate": {"bootstrap_samples": 0}},
    ],
)
def test_a_wrong_field_is_refused_whether_it_is_drawn_or_not(form: dict[str, Any], change: dict[str, Any]) -> None:
    assert refused(form, change)


def test_a_flow_without_a_config_keeps_its_form() -> None:
    own = {"properties": {"name": {"type": "string"}}, "definitions": {"Other": {"properties": {}}}}
    assert with_first_fields(own) == own
    assert "LifecycleConfig" in with_first_fields(parameter_schema(plan).model_dump())["definitions"]
