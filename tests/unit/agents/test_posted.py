"""Names and numbers from agents and environments that become metrics."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from tests.unit.agents.parts import World
from xray_runtime.agents.environments.answer_checks import as_step
from xray_runtime.agents.posted import read_posted
from xray_runtime.data.batch import Rollout
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.common.environment_protocol import Step
from xray_runtime.methods.common.sampling.episode import Episode, episode_means
from xray_runtime.rewards.source import MAX_NAMES

BAD_NAMES = [
    "steps, total",
    "",
    " ",
    "a/b",
    "../a",
    ".a",
    "-a",
    "a\n",
    "a\0b",
    "é",
    "a:b",
    "a" * 101,
    "a=b",
    "\ud800",
    "🙂",
]
GOOD_NAMES = ["steps.total", "tool_calls", "a-b", "0", "A1", "a" * 100, "a..b", "a."]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_no_metric_can_have_costs_the_episode(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"^info has the name .*: must be up to 100 letters, digits, _, - and \."
    ) as error:
        read_posted({"value": 1, "info": {name: 1}})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_the_names_that_are_left_are_mlflows(name: str) -> None:
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

    assert read_posted({"value": 1, "info": {name: 1}}).info == {name: 1.0}
    metric = f"benchmark/rollout/info/{name}"
    _validate_metric_name(metric)
    assert len(metric) <= MAX_ENTITY_KEY_LENGTH


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"value": 1, "final": "yes"}, "final is 'yes': must be true or false"),
        ({"value": 1, "info": {"a": "b"}}, r"info\['a'\] is 'b': must be a finite number"),
        ({"reward": 1}, "the result has 'reward': may have value, final, info, unusable"),
        ({"unusable": ""}, "unusable is '': must be a reason"),
    ],
)
def test_a_result_of_another_form_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_posted(given)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e31, -1e300, 10**400, "1", None, True, [1], {}])
def test_values_are_bounded_numbers(value: Any) -> None:
    for result in ({"value": 1, "info": {"a": value}}, {"value": value}, value):
        with pytest.raises(ValueError, match=r"must be a finite number( of at most 1e\+30)?$|may have value, final"):
            read_posted(result if result != {} else {"value": None})
    with pytest.raises(ValueError, match=r"^Step\.reward is .*: must be a finite number( of at most 1e\+30)?$"):
        as_step(Step(reward=value))


def test_many_posts_have_few_names_and_a_finite_sum(world: World) -> None:
    episode = world.open()
    url, headers = f"{world.gateway.url(episode)}/reward", {"x-api-key": episode.secret}
    full = {f"name{number}": 1e30 for number in range(MAX_NAMES)}
    for _ in range(2):
        post = {"value": 1e30, "final": False, "info": full}
        assert httpx.post(url, json=post, headers=headers).status_code == 200
    assert math.isfinite(float(np.float32(episode.reward)))
    answer = httpx.post(url, json={"value": 0, "final": False, "info": {"another": 1}}, headers=headers)
    assert answer.status_code == 400
    assert episode.broken == (
        "the agent posted no valid result: info['another'] is one name too many: an episode may have 100"
    )
    over = {f"name{number}": 1 for number in range(MAX_NAMES + 1)}
    with pytest.raises(ValueError, match="must be an object of up to 100 numbers"):
        read_posted({"value": 1, "info": over})


def test_environments_inform_by_names_that_metrics_can_have() -> None:
    episode = Episode(0, 0, [])
    episode.inform(dict.fromkeys(BAD_NAMES, 1) | {"ok": True, "big": 10**400, "bigger": 1e31, "text": "1"})
    assert episode.info == {"ok": 1.0}
    episode.inform({f"name{number}": 1 for number in range(1000)})
    assert len(episode.info) == MAX_NAMES
    assert as_step(Step(info={3: 1, "a": 2})).info == {"3": 1, "a": 2}


def test_a_rollout_has_few_metrics_of_names() -> None:
    infos = [{f"only{number}": 1.0, "all": 2.0, **{f"own{number}-{i}": 1.0 for i in range(50)}} for number in range(40)]
    rollout = Rollout(
        response_ids=Ragged.of([[]] * 40),
        failure=np.array([""] * 40, object),
        info=np.array([json.dumps(info) for info in infos], object),
        turns=np.ones(40, np.int32),
    )
    means = episode_means(rollout)
    assert len(means) == MAX_NAMES + 1
    assert means["info/all"] == 2.0
