"""Findings from a stage's curves: dropped data, training without effect, signs of a hacked reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from xray_runtime.algorithms.hacking import REPEATED, WATCHED, averages, describe
from xray_runtime.kernel.graph.kind import Note, Series
from xray_runtime.kernel.report.rendering import counted

SAME = 1e-9
"""Rewards with a smaller deviation count as equal."""
UNCHANGED = 1e-3
"""Nats per token, summed over iterations; a policy that learns a task reaches a hundred times as much."""
MOST = 0.9
SIGN = "hacking/"
WINDOW = 5
"""Number of iterations at each end to compare for signs of a hacked reward."""
LARGE_RISE = 1.0
"""A large rise of an evaluation's learned reward, in deviations."""
EVEN_WIN_RATE = 0.55
"""Up to this win rate, an evaluation does not show that a policy is better."""

WHY = {
    "empty": "empty",
    "too_long": "longer than max_chars",
    "too_short": "shorter than min_chars",
    "heldout_prompt_seen_in_training": "held-out ones with prompts that are trained on",
    "validation_prompt_seen_in_training": "validation ones with prompts that are trained on or held out",
    "same_or_empty": "with two equal or empty replies",
    "unmatched_transcripts": "whose transcripts begin differently or end without a reply",
    "prompt_held_out": "to prompts that are held out for evaluation",
    "withdrawn": "with withdrawn texts",
}
"""Reason to drop a reply, by its name in metrics → phrase."""
ROWS = {
    "without_reply": "without a reply to learn",
    "undesirable": "with replies labelled as bad (label)",
    "weight_0": "with weight 0",
}
"""Reason to leave out a row's replies → phrase."""
LISTED = "listed in dropped.jsonl of the checkpoint"


def base_findings(series: Series) -> list[str]:
    """Pretrained models: number of tensors and tokens that are not needed."""
    count = _counts(series, "base/").get("left_out", 0)
    return (
        [Note(f"left out {count:,} tensors or tokens that the model does not need; left_out.json lists them")]
        if count
        else []
    )


def data_findings(series: Series) -> list[str]:
    """Conversations: number of dropped replies, by reason."""
    counts = _counts(series, "data/")
    total, reasons = _dropped(counts)
    findings = [f"dropped {total:,} of {counts['read_pairs']:,} replies: {reasons}"] if total else []
    for reason, why in ROWS.items():
        if counts.get(f"dropped_{reason}"):
            findings.append(f"{counts[f'dropped_{reason}']:,} of {counts['read_records']:,} rows {why}")
    dropped: list[str] = [Note(f"{'; '.join(findings)}; {LISTED}")] if findings else []
    alone = counts.get("prompts_without_reply", 0)
    if alone:
        dropped.append(Note(f"{alone:,} of {counts['read_pairs']:,} prompts have no reply: sft leaves them out"))
    return dropped + _unread(counts)


def preferences_findings(series: Series) -> list[str]:
    """Preference pairs: number of dropped pairs, by reason."""
    counts = _counts(series, "preferences/")
    total, reasons = _dropped(counts)
    dropped: list[str] = [Note(f"dropped {total:,} of {counts['pairs'] + total:,} pairs: {reasons}")] if total else []
    return dropped + _unread(counts)


def _unread(counts: Mapping[str, int]) -> list[str]:
    """The most frequent columns and keys of messages that were not read."""
    findings = []
    for what in ("columns_not_read", "message_keys_not_read"):
        named = {n.removeprefix(f"{what}/"): count for n, count in counts.items() if n.startswith(f"{what}/")}
        most = sorted(named.items(), key=lambda item: (-item[1], item[0]))
        if most:
            findings.append(f"{what.replace('_', ' ')}: {', '.join(f'{name} {count:,}' for name, count in most)}")
    return [Note("; ".join(findings))] if findings else []


def sft_findings(series: Series) -> list[str]:
    """Fine-tuning: number of replies that were too long."""
    counts = _counts(series, "sft/")
    prompts, replies = (counts.get(f"dropped_{which}_too_long", 0) for which in ("prompt", "reply"))
    if not prompts + replies:
        return []
    reasons = []
    if prompts:
        limit = f"{counts['max_prompt_tokens']:,} tokens (data.max_prompt_tokens)"
        reasons.append(f"{prompts:,} to prompts of more than {limit}")
    if replies:
        reasons.append(f"{replies:,} of more than {counts['max_response_tokens']:,} tokens (sft.max_response_tokens)")
    total = prompts + replies
    return [Note(f"dropped {total:,} of {counts['pairs'] + total:,} replies: {', '.join(reasons)}; {LISTED}")]


def pairs_findings(series: Series) -> list[str]:
    """Stages that train on pairs: number of those that the model's context does not hold."""
    counts = _counts(series, "lengths/")
    if not counts.get("too_long"):
        return []
    text = f"dropped {counts['too_long']:,} pairs longer than the model's context of {counts['max_tokens']:,} tokens"
    return [Note(text)]


def prompt_findings(series: Series) -> list[str]:
    """Stages that sample replies: number of prompts that were too long."""
    counts = _counts(series, "prompts/")
    if not counts.get("too_long"):
        return []
    text = (
        f"left out {counted(counts['too_long'], 'row')} with prompts of more than {counts['max_tokens']:,} tokens "
        f"(data.max_prompt_tokens); {counts['different']:,} distinct prompts remain"
    )
    return [Note(text)]


def _counts(series: Series, group: str) -> dict[str, int]:
    return {n.removeprefix(group): round(p[-1][1]) for n, p in series.items() if n.startswith(group) and p}


def _dropped(counts: Mapping[str, int]) -> tuple[int, str]:
    """The number of dropped rows, and the reasons, the most frequent first."""
    reasons = sorted(((counts.get(f"dropped_{key}", 0), why) for key, why in WHY.items()), reverse=True)
    return sum(n for n, _ in reasons), ", ".join(f"{n:,} {why}" for n, why in reasons if n)


def policy_findings(series: Series) -> list[str]:
    """Policy gradients: rewards without information, a policy that hardly changed, or signs of a hacked reward (metrics
    `hacking/…` from training)."""
    findings = prompt_findings(series)
    deviations, tied = _values(series, "reward/std"), _values(series, "rollout/tied_groups")
    if deviations and max(deviations) <= SAME:
        findings.append("every reply had the same reward, so the policy could not learn")
    elif tied and min(tied) >= 1.0:
        findings.append("all replies to each prompt had the same reward, so no advantage was other than 0")
    elif tied and fmean(tied) >= MOST:
        findings.append(f"all replies had the same reward for {fmean(tied):.0%} of the prompts, which had no effect")
    moved = _values(series, "policy/approx_kl")
    if moved and sum(moved) < UNCHANGED:
        findings.append(
            f"the policy hardly changed: {sum(moved):.1g} nats per token over all updates; try a larger lr or more "
            "iterations"
        )
    cut = _values(series, "rollout/truncated")
    if cut and min(cut) >= MOST:
        findings.append(f"{fmean(cut):.0%} of the replies were cut off at max_new_tokens")
    return findings + _hacking(series)


def _hacking(series: Series) -> list[str]:
    names = sorted(name for name in series if name.startswith(SIGN))
    steps = sorted({step for points in series.values() for step, _ in points})
    size = max(1, min(WINDOW, len(steps) // 2))
    findings = []
    for name in names:
        # Describe it at its last occurrence: the stage may have ended because of it, or continued without it.
        first_seen, last_seen = series[name][0][0], series[name][-1][0]
        until = [step for step in steps if step <= last_seen]
        early, late = (averages(_points(series, part)) for part in (steps[:size], until[-size:]))
        try:
            text = describe(name.removeprefix(SIGN), early, late)
        except KeyError:  # the record lacks metrics that the sign is based on
            text = f"a sign of a hacked reward: {name.removeprefix(SIGN)}"
        findings.append(f"{text} (seen from iteration {first_seen + 1} on)")
    return findings


def monitored(series: Series) -> list[tuple[str, str]]:
    """The hacking monitor's signs, and each metric that it compares, at the beginning and the end; empty if the monitor
    was off."""
    if REPEATED not in series:
        return []
    signs = {name.removeprefix(SIGN): len(points) for name, points in sorted(series.items()) if name.startswith(SIGN)}
    alerts = [("signs of a hacked reward", ", ".join(f"{n} in {i} iterations" for n, i in signs.items()) or "none")]
    for name, points in sorted(series.items()):
        if name.startswith(WATCHED) and points:
            size = max(1, min(WINDOW, len(points) // 2))
            ends = (fmean([value for _, value in part]) for part in (points[:size], points[-size:]))
            alerts.append((name, " → ".join(f"{end:.4g}" for end in ends)))
    return alerts


def _points(series: Series, steps: Sequence[int]) -> list[dict[str, float]]:
    by_step = {name: dict(points) for name, points in series.items()}
    return [{name: points[step] for name, points in by_step.items() if step in points} for step in steps]


def evaluation_findings(series: Series) -> list[str]:
    """Evaluations: a learned reward that rose although the gold score, or else the judge, did not."""
    last = {name.removeprefix("evaluate/"): points[-1][1] for name, points in series.items() if points}
    findings = prompt_findings(series)
    if any(name not in last for name in ("reward_before", "reward_after", "win_rate")):
        return findings
    before, after, rate = (last[name] for name in ("reward_before", "reward_after", "win_rate"))
    if not after - before >= LARGE_RISE or rate > EVEN_WIN_RATE:
        return findings
    judged = "its judge did not find it better"
    if "gold_before" in last and "gold_after" in last:
        judged = f"the gold score went from {last['gold_before']:+.2f} to {last['gold_after']:+.2f}"
    return [
        *findings,
        f"the learned reward rose from {before:+.2f} to {after:+.2f} while {judged} (win rate {rate:.2f}): the policy "
        "learned to please the reward, not what it stands for",
    ]


def _values(series: Series, name: str) -> list[float]:
    return [value for _, value in series.get(name, ())]
