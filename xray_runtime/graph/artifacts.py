"""Types of checkpoints: what a stage makes, and what another takes as input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from xray_runtime.store.ref import CheckpointRef


@dataclass(frozen=True)
class Artifact:
    """A published checkpoint as a stage body sees it."""

    path: Path
    """Its directory; nothing in it ever changes."""
    is_model: ClassVar[bool] = False
    """Whether it has weights, of a shape that what is made from it shares."""


class Dataset(Artifact):
    """Prompt/reply pairs: train.arrow, heldout.arrow, and dataset.json with the longest prompt in tokens."""


class Preferences(Artifact):
    """Pairs of replies, one of them preferred: train.arrow, heldout.arrow."""


VERDICTS, JUDGED_PAIRS = "judgements.jsonl", "pairs.arrow"


class Judgements(Artifact):
    """What people judged: `VERDICTS`, and `JUDGED_PAIRS` made of them."""


class Model(Artifact):
    """A causal language model in Hugging Face form."""

    is_model = True


REWARD_HEAD = "reward_head/head.safetensors"
"""In a directory of its own: vLLM loads every safetensors file beside config.json."""
VALUE_HEAD = "value_head/head.safetensors"
"""Of a policy: the rollouts that it learned from, a Parquet file an iteration."""
SHOWN_ROLLOUTS = "rollouts"
"""Table of a few of them, which the stage records; the report shows it."""


class RewardModel(Artifact):
    """A model with a scalar head in `REWARD_HEAD`, and reward.json with the mean and deviation of its scores."""

    is_model = True


class Evaluation(Artifact):
    """How a policy did against another: evaluation.json, samples.json, prompts.json."""


class Benchmark(Artifact):
    """What a policy can do by itself: benchmark.json, samples.json, prompts.json."""


class Comparison(Artifact):
    """A candidate against a champion: comparison.json, samples.json, prompts.json."""


TYPES: dict[str, type[Artifact]] = {
    t.__name__: t
    for t in (Artifact, Dataset, Preferences, Judgements, Model, RewardModel, Evaluation, Benchmark, Comparison)
}
"""By the name that stands in a manifest."""


def is_a(name: str, *types: type[Artifact]) -> bool:
    """Whether the type of this name is one of `types`. A type that nobody registered in this process is none."""
    return issubclass(TYPES.get(name, object), types)


def dataset_of(parents: Iterable[CheckpointRef]) -> str | None:
    """`Manifest.dataset`: sha256 of the first parent that holds data to train or be judged on."""
    return next((parent.sha256 for parent in parents if is_a(parent.type, Dataset, Preferences)), None)
