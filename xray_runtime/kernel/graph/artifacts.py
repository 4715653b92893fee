"""Types of checkpoints, the outputs and inputs of stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from xray_runtime.kernel.store.ref import CheckpointRef


@dataclass(frozen=True)
class Artifact:
    """A published checkpoint, as passed to a stage body."""

    path: Path
    """Its directory, which never changes."""
    is_model: ClassVar[bool] = False
    """Whether it has weights, whose shape models made from it share."""


class Dataset(Artifact):
    """Prompt/reply pairs: train.arrow, heldout.arrow, and dataset.json with the longest prompt in tokens."""


class Preferences(Artifact):
    """Pairs of replies, one of them preferred: train.arrow, heldout.arrow."""


VERDICTS, JUDGED_PAIRS = "judgements.jsonl", "pairs.arrow"


class Judgements(Artifact):
    """Human verdicts: `VERDICTS`, and the `JUDGED_PAIRS` made from them."""


DEMONSTRATIONS = "demonstrations.arrow"
HELDOUT_OF = "heldout_{}"
"""File of the held-out users and conversations beside one to train on."""


class Curated(Judgements):
    """Recorded feedback and verdicts after the rules of `curate`; `JUDGED_PAIRS` and `DEMONSTRATIONS` have a held-out
    side, and stats.json says whether it is held for a person."""


FEEDBACK, ANSWERS = "feedback.jsonl", "answers.jsonl"
PEOPLE = "people.json"
"""Pseudonym → rows of that person, of datasets made from recorded feedback."""


class Feedback(Artifact):
    """Some segments of `xray serve --record`, decrypted: `FEEDBACK` and `ANSWERS`."""


class Model(Artifact):
    """A causal language model in Hugging Face form."""

    is_model = True


REWARD_HEAD = "reward_head/head.safetensors"
"""In its own directory, because vLLM loads every safetensors file next to config.json."""
ADAPTER = "adapter"
"""Folder of a model with the adapter that was trained, in peft's form, beside the weights that have it merged."""
VALUE_HEAD = "value_head/head.safetensors"
"""Head of a critic that is part of the policy."""
EPISODES = "episodes.jsonl"
"""Records of agents' episodes that no ledger has: evaluations and validations."""
SHOWN_ROLLOUTS = "rollouts"
"""Table of a few rollouts, which the report shows."""


class RewardModel(Artifact):
    """A model with a scalar head in `REWARD_HEAD`, and reward.json with the mean and deviation of its scores."""

    is_model = True


class Evaluation(Artifact):
    """A policy compared with another: evaluation.json, samples.json, lost.json, prompts.json."""


class Benchmark(Artifact):
    """Scores of one policy: benchmark.json, samples.json, prompts.json."""


class Comparison(Artifact):
    """A candidate compared with a champion: comparison.json, samples.json, lost.json, prompts.json."""


TYPES: dict[str, type[Artifact]] = {
    t.__name__: t
    for t in (
        *(Artifact, Dataset, Preferences, Judgements, Curated, Feedback),
        *(Model, RewardModel, Evaluation, Benchmark, Comparison),
    )
}
"""Types by their name in a manifest."""


def is_a(name: str, *types: type[Artifact]) -> bool:
    """Whether `name` is a type registered in this process and a subclass of one of `types`."""
    return issubclass(TYPES.get(name, object), types)


def dataset_of(parents: Iterable[CheckpointRef]) -> str | None:
    """`Manifest.dataset`: sha256 of the first parent that is a dataset."""
    return next((parent.sha256 for parent in parents if is_a(parent.type, Dataset, Preferences)), None)
