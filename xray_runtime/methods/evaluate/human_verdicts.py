"""Human verdicts on two models' replies as a judge of an evaluation or a comparison.

It is independent: the verdicts are on replies of the finished policy. Only held-out prompts count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xray_runtime.algorithms.verdicts import SHARES, mean_share, outcomes
from xray_runtime.data.pairs import HELDOUT, pairs_of, prompt_text
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.graph.artifacts import VERDICTS
from xray_runtime.kernel.store.checkpoints import read_manifest


def human_judge(
    verdicts: Path, sides: Mapping[str, Path], prompts: Path, seen: TextSet | None = None
) -> dict[str, Any]:
    """One of the `judges` of an evaluation or a comparison, with the same numbers as other judges: a reply scores
    1 if it was preferred, 0 if the other was, and one half otherwise.

    Args:
        verdicts: checkpoint of `xray preferences`.
        sides: name → checkpoint, first of the model whose wins are counted.
        prompts: the dataset whose held-out prompts count.
        seen: prompts that one of the two was trained on; they do not count.

    Raises:
        ValueError: there is no verdict on replies of these two to such prompts.
    """
    better, worse = sides.values()
    judged = (read_manifest(better)[1], read_manifest(worse)[1])
    heldout = TextSet(pairs_of(prompts / HELDOUT).prompt_texts())
    shares: dict[str, list[float]] = {}
    with (verdicts / VERDICTS).open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            models, share = (row.get("model_a", ""), row.get("model_b", "")), SHARES.get(row["verdict"])
            prompt = prompt_text(row["prompt"])
            counts = prompt in heldout and (seen is None or prompt not in seen)
            if share is not None and sorted(models) == sorted(judged) and counts:
                shares.setdefault(prompt, []).append(share if models == judged else 1.0 - share)
    if not shares:
        raise ValueError(
            f"verdicts: {verdicts.name} has no verdict on replies of {better.name} and {worse.name} to held-out "
            f"prompts of {prompts.name}: make some with `xray compare` and publish them with `xray preferences`"
        )
    rate, (low, high) = mean_share(shares.values())
    return {
        "judges": True,
        "samples": len(shares),
        **outcomes(sum(values) / len(values) for values in shares.values()),
        "win_rate": rate,
        "win_rate_ci95": [low, high],
        "delta": 2 * rate - 1,
        "delta_ci95": [2 * low - 1, 2 * high - 1],
        **{f"score_{side}": score for side, score in zip(sides, (rate, 1 - rate), strict=True)},
    }
