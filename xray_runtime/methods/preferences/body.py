"""Stage `preferences`: pairs of replies to one prompt, one of them preferred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.algorithms.groups import best_of, tied, worst_of
from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.gold import load_gold
from xray_runtime.data.heldout import held_out_prompts, split_by_prompt
from xray_runtime.data.length_baseline import length_baseline_accuracy
from xray_runtime.data.pairs import HELDOUT, TRAIN, Example, Pairs, PairsWriter, PreferenceExample, prompt_text
from xray_runtime.data.pictures import FOLDER
from xray_runtime.data.reading.forms import renamed
from xray_runtime.data.reading.keys import Unread
from xray_runtime.data.reading.pictures import PictureFolder, keep_pictures_of
from xray_runtime.data.reading.record_files import Records, Where
from xray_runtime.data.reading.sources import chitchat_conversations, read_records
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.graph.artifacts import JUDGED_PAIRS
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.results import write_json
from xray_runtime.methods.common.sampling.policy_replies import sample_groups_of
from xray_runtime.methods.common.sampling.sampled_groups import sample_groups
from xray_runtime.methods.common.sampling.scoring import own_texts
from xray_runtime.methods.common.training.dataset import max_prompt_tokens
from xray_runtime.methods.common.training.prompts import UniquePrompts, drawn
from xray_runtime.methods.curate.recorded_data import curated_pairs
from xray_runtime.methods.preferences.config import (
    CuratedPreferences,
    DatasetPreferences,
    JudgedPreferences,
    RatingPreferences,
    RewardedPreferences,
    SampledPreferences,
)
from xray_runtime.methods.preferences.rows import from_dataset, label_pairs, split_ratings
from xray_runtime.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.preferences.kind import PreferencesInputs


def run(stage: Stage[Any, PreferencesInputs], out: Path, recorder: Recorder) -> int:
    """Writes train.arrow, heldout.arrow (no prompt on both sides), stats.json and dropped.jsonl (rows of your own pairs
    that were left out, with reasons). None of them contains gold scores."""
    config, unread = stage.config, Unread()
    sided: Iterable[tuple[bool, PreferenceExample]]
    with (
        PairsWriter(out / TRAIN, PreferenceExample) as train,
        PairsWriter(out / HELDOUT, PreferenceExample) as heldout,
        DroppedRows(out) as left_out,
    ):
        if isinstance(config, RatingPreferences):
            sided, stats = _from_ratings(stage, config)
        elif isinstance(config, CuratedPreferences):
            sided, stats = curated_pairs(stage, left_out), {}
        else:
            pairs: Iterable[PreferenceExample]
            if isinstance(config, SampledPreferences):
                pairs, stats = _from_gold(stage, config, out, recorder)
            elif isinstance(config, RewardedPreferences):
                pairs, stats = _from_rewards(stage, out, recorder)
            else:
                pairs, stats = _from_dataset(stage, config, out, left_out, unread), {}
            sided = split_by_prompt(pairs, config.heldout_fraction, stage.seed)
        for held_out, pair in sided:
            (heldout if held_out else train).append(pair)
    sampled = [stage.inputs.data.path / FOLDER] if stage.inputs.data is not None else []
    if pictures := keep_pictures_of(out / FOLDER, (out / TRAIN, out / HELDOUT), sampled):
        stats["pictures"] = pictures
    stats |= {"pairs": train.count + heldout.count} | {f"dropped_{why}": n for why, n in left_out.counts.items()}
    if not train.count or not heldout.count:
        dropped = {name: count for name, count in sorted(stats.items()) if name.startswith("dropped") and count}
        raise ValueError(
            f"{stage.name}: {train.count} training and {heldout.count} held-out pairs; both must be at least 1: add "
            f"pairs or change heldout_fraction (dropped: {dropped})"
        )
    written = [Pairs(out / side, PreferenceExample) for side in (TRAIN, HELDOUT)]
    stats["length_baseline_accuracy"] = length_baseline_accuracy(*written)
    write_json(out / "stats.json", {**stats, **unread.counts()})
    metrics = {f"preferences/{name}": float(value) for name, value in stats.items()}
    recorder.metrics(metrics | unread.metrics("preferences"), step=0)
    recorder.table(
        "preferences", ["prompt", "chosen", "rejected"], [[prompt_text(p.prompt), *p.texts] for p in written[1][:20]]
    )
    note = "; ".join(filter(None, ["labelled", str(unread)]))
    recorder.progress(train.count + heldout.count, train.count + heldout.count, "pairs", note)
    return 0


def _from_ratings(
    stage: Stage[Any, PreferencesInputs], config: RatingPreferences
) -> tuple[Iterable[tuple[bool, PreferenceExample]], dict[str, float]]:
    assert stage.inputs.data is not None
    examples = list(Pairs(stage.inputs.data.path / TRAIN, Example))
    ratings = {c.id: float(c.ratings[config.rating]) for c in chitchat_conversations() if config.rating in c.ratings}
    train, heldout, stats = split_ratings(examples, ratings, config, derive_seed(stage.seed, stage.name, "pairs"))
    return [*((False, pair) for pair in train), *((True, pair) for pair in heldout)], stats


def _from_dataset(
    stage: Stage[Any, PreferencesInputs],
    config: DatasetPreferences | JudgedPreferences,
    out: Path,
    dropped: DroppedRows,
    unread: Unread,
) -> Iterator[PreferenceExample]:
    """Your own pairs, or human verdicts, without prompts that are held out for evaluation."""
    records: Iterable[tuple[Where, dict[str, Any]]]
    if isinstance(config, JudgedPreferences):
        assert stage.inputs.judgements is not None
        judged = Pairs(stage.inputs.judgements.path / JUDGED_PAIRS, PreferenceExample)
        records = ((Where("judgements", "pair", n, n), pair.record) for n, pair in enumerate(judged, start=1))
    else:
        pictures = PictureFolder(out / FOLDER, config.pictures)
        read = _renamed(config, read_records("preferences.path", config.path, config.split)[1])
        records = ((where, pictures.store(where, record)) for where, record in read)
    data = stage.inputs.data
    held_out = held_out_prompts(data.path) if data is not None else TextSet()
    for row, pair in from_dataset(records, config.max_pairs, dropped, unread):
        if prompt_text(pair.prompt) in held_out:
            dropped.add("prompt_held_out", {"row": row})
        else:
            yield pair


def _renamed(config: DatasetPreferences, records: Records) -> Records:
    names, field, unseen = config.rename_columns, "preferences.rename_columns", set(config.rename_columns)
    for where, record in records:
        yield where, renamed(field, where, record, names, unseen)
    if unseen:
        raise ValueError(f"{field}: {min(unseen)!r} has a value in no record of {config.path!r}")


def _from_gold(
    stage: Stage[Any, PreferencesInputs], config: SampledPreferences, out: Path, recorder: Recorder
) -> tuple[list[PreferenceExample], dict[str, float]]:
    assert stage.inputs.policy is not None
    assert stage.inputs.data is not None
    policy, data = stage.inputs.policy.path, stage.inputs.data.path
    tokenizer = load_tokenizer(policy)
    gold = load_gold(config.gold, stage.functions)
    limit = max_prompt_tokens(data, policy, config.max_new_tokens)
    found = UniquePrompts(tokenizer, data / TRAIN, limit, stage.seal)
    chosen = drawn(stage, len(found), config.num_pairs)
    prompts = [found[i] for i in chosen]
    if len(prompts) < config.num_pairs:
        raise ValueError(
            f"{stage.name}.num_pairs: {config.num_pairs} is not allowed: the dataset has only {len(prompts)} prompts"
        )

    def done(count: int) -> None:
        recorder.progress(count // 2, len(prompts), "pairs", "sampling replies")

    # Rows 2i and 2i + 1 are the two replies to prompt i.
    given = stage, policy, tokenizer, found, chosen, 2, config.max_new_tokens, recorder.log_dir, out, done
    replies = own_texts(tokenizer, sample_groups_of(*given))
    scores = gold([prompt_text(messages) for messages, _ in prompts for _ in range(2)], replies)
    return label_pairs(
        [messages for messages, _ in prompts],
        list(zip(replies[::2], replies[1::2], strict=True)),
        list(zip(scores[::2], scores[1::2], strict=True)),
        config.sharpness,
        derive_seed(stage.seed, stage.name, "labels"),
    )


def _from_rewards(
    stage: Stage[Any, PreferencesInputs], out: Path, recorder: Recorder
) -> tuple[list[PreferenceExample], dict[str, float]]:
    """The best and the worst reply to each prompt, without prompts whose replies are tied."""
    assert stage.inputs.policy is not None
    assert stage.inputs.data is not None
    groups = sample_groups(stage, stage.inputs.policy.path, stage.inputs.data.path, out, recorder)
    best, worst = best_of(groups.rewards).tolist(), worst_of(groups.rewards).tolist()
    stats = groups.stats | {"dropped_tied": 0.0, "dropped_same": 0.0}
    pairs = []
    for row, even in enumerate(tied(groups.rewards).tolist()):
        chosen, rejected = groups.replies[row][best[row]], groups.replies[row][worst[row]]
        if even or chosen == rejected:
            stats["dropped_tied" if even else "dropped_same"] += 1
        else:
            pairs.append(PreferenceExample(f"{stage.name}-{row}", groups.prompts[row], chosen, rejected))
    return pairs, stats | {"pairs": float(len(pairs))}
