"""What may be searched: everything that is wrong is one line, before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tests.message_texts import Messages
from xray.flows.search import SearchConfig, load_search
from xray.flows.study import Search, calls_until, search_space
from xray.flows.subject import Subject
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.loading import load_config

ROOT = Path(__file__).parents[3]
TINY = Subject(config=load_config(ROOT / "configs" / "tiny.yaml"))


def searching(fields: dict[str, Any], **more: Any) -> SearchConfig:
    return SearchConfig.model_validate({"fields": fields, **more})


def load(tmp_path: Path, content: dict[str, Any]) -> SearchConfig:
    path = tmp_path / "rates.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_search(path)


def test_a_range_is_whole_where_the_field_is() -> None:
    space = search_space(
        TINY,
        searching(
            {
                "sft.lr": {"low": 1, "high": 2},
                "sft.batch_size": {"low": 8, "high": 32, "log": True},
                "ppo.stages.1.kl.controller": {"choices": ["fixed", "adaptive"]},
                "sft.lora": {"choices": [None, {"rank": 4}]},
            }
        ),
    )
    assert space == {
        "sft.lr": FloatDistribution(1.0, 2.0),
        "sft.batch_size": IntDistribution(8, 32, log=True),
        "ppo.stages.1.kl.controller": CategoricalDistribution(['"fixed"', '"adaptive"']),
        "sft.lora": CategoricalDistribution(["null", '{"rank": 4}']),
    }


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"sft.stepps": {"low": 1, "high": 2}}, {}),
        ({"sft.lr": {"low": -0.1, "high": 1}}, {}),
        ({"ppo.stages.0.gamma": {"low": 0.5, "high": 1.5}}, {}),
        ({"sft.steps": {"low": 1.5, "high": 9}}, {}),
        ({"ppo.stages.7.lr": {"low": 1, "high": 2}}, {}),
        ({"ppo.stages.0.kl.estimator": {"low": 1, "high": 2}}, {}),
        ({"sft.schedule": {"choices": ["linear", "square"]}}, {}),
        ({"reward.lr": {"low": 1, "high": 2}}, {"until": "sft"}),
        ({"runtime.restarts": {"low": 1, "high": 2}}, {}),
        ({"sft.lr": {"low": 1, "high": 2}}, {"until": "ppo-3"}),
        ({"sft.lr": {"low": 1, "high": 2}}, {"until": "sft", "prune": {"stage": "ppo-1"}}),
        ({"base.hidden_size": {"choices": [96, 100]}}, {}),
    ],
    ids=str,
)
def test_fields_the_config_lacks_are_refused(
    fields: dict[str, Any], more: dict[str, Any], message_texts: Messages
) -> None:
    with message_texts.raises(ConfigError) as error:
        search_space(TINY, searching(fields, **more))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "field",
    [
        {"low": 2, "high": 1},
        {"low": 0, "high": 1, "log": True},
        {"low": 1},
        {"choices": [1, 2], "log": True},
        {"choices": [1]},
        {"hihg": 1},
    ],
    ids=str,
)
def test_invalid_ranges_are_refused(field: dict[str, Any], tmp_path: Path, message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        load(tmp_path, {"fields": {"sft.lr": field}})


def test_fields_that_hang_together_may_vary_together() -> None:
    """Each head count alone would not fit the hidden size of 64 that tiny.yaml has."""
    heads = {"base.num_heads": {"choices": [3, 2]}, "base.num_kv_heads": {"choices": [3, 2]}}
    search = searching({"base.hidden_size": {"choices": [96, 64]}, **heads})
    assert search_space(TINY, search)["base.num_heads"] == CategoricalDistribution(["3", "2"])


def test_the_name_is_the_files_and_trials_may_be_more(tmp_path: Path) -> None:
    search = load(tmp_path, {"fields": {"sft.lr": {"low": 1, "high": 2}}})
    assert (search.name, search.trials) == ("rates", 20)
    assert load_search(tmp_path / "rates.yaml", 30).trials == 30
    with pytest.raises(ConfigError, match="trials: 0 is not allowed"):
        load_search(tmp_path / "rates.yaml", 0)


def test_stages_before_what_is_searched_are_shared() -> None:
    a, b = (TINY.with_values({"ppo.stages.0.lr": lr}) for lr in (1e-3, 1e-4))
    pairs = zip(calls_until(a, "ppo-2"), calls_until(b, "ppo-2"), strict=True)
    shared = [one.name for one, other in pairs if one.config == other.config]
    assert shared == ["prepare", "base", "sft", "preferences", "reward", "ppo-2"]


def test_more_trials_are_the_same_search_and_another_metric_is_not(tmp_path: Path) -> None:
    def of(**changes: Any) -> Search:
        search = searching({"sft.lr": {"low": 1, "high": 2}}, **changes)
        return Search(tmp_path, TINY, search, search_space(TINY, search))

    rate, search = {"sft.lr": 1.5}, of()
    assert search.directory_of(rate) == of(trials=99, seed=5).directory_of(rate)
    assert search.directory_of(rate) != of(metric="evaluate/kl").directory_of(rate)
    assert search.directory_of(rate) != search.directory_of({"sft.lr": 1.25})
    assert search.study.study_name == of(trials=99, concurrent=2).study.study_name
    assert search.study.study_name != of(seed=5).study.study_name


def test_the_example_fits_its_config() -> None:
    for path in (ROOT / "configs" / "search").glob("*.yaml"):
        preset = path.stem.split("-")[0]
        assert search_space(Subject(config=load_config(ROOT / "configs" / f"{preset}.yaml")), load_search(path))
