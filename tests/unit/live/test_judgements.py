"""What people judged as a dataset: signed, audited, and shown behind the reward model that learned from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.message_texts import Messages
from tests.unit.trust.commands import place, xray
from tests.unit.trust.synthetic import Lifecycle, pair_file, prompt, weights
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import Example, Pairs, PreferenceExample
from xray_runtime.data.text_set import TextSet
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset, Judgements
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.live.feedback.comparison import of_dataset
from xray_runtime.live.feedback.judgements import Judgement, Question, Verdict
from xray_runtime.live.feedback.publication import publish
from xray_runtime.live.feedback.session import Session, Setup, session_directory
from xray_runtime.methods.evaluate.human_verdicts import human_judge
from xray_runtime.methods.preferences import body as preferences
from xray_runtime.methods.preferences.config import JudgedPreferences
from xray_runtime.methods.preferences.kind import PreferencesInputs
from xray_runtime.trust.adopt import checkpoint_from
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.keys import trust

VERDICTS: list[Verdict] = ["a", "b", "tie", "bad", "skip", "a"]


def judge(output: Path, prompts: str = "train", numbers: range = range(6)) -> Session:
    """Somebody compared sft and ppo-2 on questions of that side."""
    nodes = {node.manifest.stage: node for node in open_lineage_store(output, None).graph.nodes.values()}
    setup = Setup(
        a=nodes["sft"].sha256,
        b=nodes["ppo-2"].sha256,
        prompts=prompts,  # type: ignore[arg-type]
        source=nodes["prepare"].sha256,
        max_prompt_tokens=32,
        max_new_tokens=8,
        temperature=1.0,
        seed=0,
    )
    session = Session.read(session_directory(output, setup))
    for number, (asked, verdict) in enumerate(zip(numbers, VERDICTS, strict=True)):
        session.add_questions([Question(number=number, prompt=prompt(asked), a=f"a{number}", b=f"b{number}")])
        session.add_judgement(
            Judgement(number=number, left="b", verdict=verdict, judge="ada", at="2026-01-01T00:00:00+00:00")
        )
    return session


def published(output: Path) -> Path:
    return publish(open_lineage_store(output, None), "synthetic", "ada").checkpoint.path


def test_it_is_published_once_signed_and_sound(fresh: Callable[[], Path]) -> None:
    output = fresh()
    judge(output)
    first = publish(open_lineage_store(output, None), "synthetic", "ada")
    assert first.is_new
    assert first.heldout == 0
    assert first.stats == {
        "pairs": 3, "judgements": 6, "ties": 1, "both_bad": 1, "skipped": 1, "judges": {"ada": 6}
    }  # fmt: skip
    found = [(p.chosen, p.rejected) for p in Pairs(first.checkpoint.path / "pairs.arrow", PreferenceExample)]
    assert found == [("a0", "b0"), ("b1", "a1"), ("a5", "b5")]
    again = publish(open_lineage_store(output, None), "synthetic", "bob")
    assert (again.is_new, again.checkpoint.sha256) == (False, first.checkpoint.sha256)
    result = audit(open_lineage_store(output, None))
    assert [f for f in result.findings if f.is_broken] == []
    assert result.checkpoints == 9
    # More judgements make another dataset, beside the first.
    judge(output, "heldout", range(50, 56))
    more = publish(open_lineage_store(output, None), "synthetic", "ada")
    assert (more.stats["pairs"], more.heldout) == (6, 3)
    assert audit(open_lineage_store(output, None)).is_sound


def test_a_publication_cut_short_is_finished(fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    output = fresh()
    judge(output)

    def lost(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("xray_runtime.kernel.tracking.mlflow_tracker.StageRun.log_checkpoint", lost)
        with pytest.raises(KeyboardInterrupt):
            published(output)
    assert "mlflow-model-missing" in {f.code for f in audit(open_lineage_store(output, None)).findings}
    published(output)
    assert audit(open_lineage_store(output, None)).is_sound


@pytest.mark.parametrize(
    "name",
    ["judgements.jsonl", *(pytest.param(name, marks=pytest.mark.long) for name in ("pairs.arrow", "stats.json"))],
)
def test_a_changed_judgement_is_found(name: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    judge(output)
    directory = published(output)
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content.replace(b"a", b"b", 1))
    result = audit(open_lineage_store(output, None))
    assert [(f.code, f.detail) for f in result.findings if f.is_broken] == [("file-changed", f"{name} was changed")]
    with pytest.raises(ConfigError, match=f"differs from what was published: {name} was changed"):
        checkpoint_from(str(directory), output, None)


def test_a_reward_model_leads_to_who_was_judged(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    judge(output)
    judged = checkpoint_from(str(published(output)), output, f"sqlite:///{output / 'mlflow.db'}")
    assert judged.mlflow_model_id is not None
    life = Lifecycle.resumed(output)
    nothing = pair_file(PreferenceExample)
    rows = {"train.arrow": nothing, "heldout.arrow": nothing, "stats.json": b'{"pairs": 3}'}
    life.add("preferences", "preferences", rows, {"data": "prepare", "judgements": "judgements"}, seed=1)
    files = {"config.json": b"{}", "model.safetensors": weights("other")}
    reward = life.add("reward", "reward_model", files, {"policy": "sft", "data": "preferences"}, seed=1)
    tree = xray("lineage", reward.path).output
    assert f"judgements: judgements {judged.sha256[:12]}  (3 pairs)" in tree
    assert all(f": {stage} {life.done[stage].sha256[:12]}" in tree for stage in ("sft", "ppo-2", "prepare"))
    result = audit(open_lineage_store(output, None))
    assert [f for f in result.findings if f.is_broken] == []
    # It travels, and what people said is never pruned.
    assert "11 checkpoints" in xray("export", reward.path, tmp_path / "reward.tar").output
    key = output / "keys" / "signing.pub"
    assert xray("import", tmp_path / "reward.tar", "--output", tmp_path / "other", "--public-key", key).exit_code == 0
    kept = json.loads(xray("prune", "--output", output, "--json").output)
    assert judged.sha256 in kept["keep"]
    assert reward.sha256 in kept["remove"]


def test_judgements_of_another_directory_come_with_who_was_judged(fresh: Callable[[str], Path], tmp_path: Path) -> None:
    output, other = fresh("run"), tmp_path / "other"
    with pytest.raises(ConfigError, match="there are no verdicts in"):
        published(output)
    judge(output)
    directory = published(output)
    trust(other, output / "keys" / "signing.pub")
    ref = checkpoint_from(str(directory), other, f"sqlite:///{other / 'mlflow.db'}")
    assert (ref.path, ref.type) == (other / "checkpoints" / directory.name, "Judgements")
    result = audit(open_lineage_store(other, None))
    assert [f for f in result.findings if f.is_broken] == []


class Silent:
    """A recorder that nobody listens to."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir

    def progress(self, *_: Any) -> None: ...

    def metrics(self, *_: Any, **__: Any) -> None: ...

    def table(self, *_: Any) -> None: ...


def test_the_stage_reads_its_pairs_and_leaves_out_what_is_held_out(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    judge(output, "train")
    judge(output, "heldout", range(50, 56))
    directory = published(output)
    prepare = next(n for n in open_lineage_store(output, None).graph.nodes.values() if n.manifest.stage == "prepare")
    recorder: Any = Silent(tmp_path)
    stage: Stage[Any, Any] = Stage(
        name="preferences",
        seed=1,
        config=JudgedPreferences(heldout_fraction=0.5),
        inputs=PreferencesInputs(data=Dataset(prepare.directory), judgements=Judgements(directory)),
        runtime=RuntimeConfig(),
        open_models=None,  # type: ignore[arg-type]
    )
    preferences.run(stage, tmp_path, recorder)
    both = [p for side in ("train", "heldout") for p in Pairs(tmp_path / f"{side}.arrow", PreferenceExample)]
    assert sorted(p.chosen for p in both) == ["a0", "a5", "b1"]
    assert json.loads((tmp_path / "stats.json").read_text())["dropped_prompt_held_out"] == 3


def test_held_out_prompts_are_those_neither_model_was_trained_on(fresh: Callable[[], Path]) -> None:
    output = fresh()
    life = Lifecycle.resumed(output)
    # A dataset that holds out what the first one trained on, and the other way round.
    first = Pairs(place(output, "prepare") / "heldout.arrow", Example)[:1]
    data = {"train.arrow": pair_file(Example, first), "heldout.arrow": pair_file(Example), "stats.json": b"{}"}
    life.add("prepare-2", "prepare", data, {}, seed=2)
    files = {"config.json": b"{}", "model.safetensors": weights("second")}
    life.add("sft-2", "sft", files, {"data": "prepare-2"}, seed=2)
    there = open_lineage_store(output, None)
    nodes = {node.manifest.stage: node for node in there.graph.nodes.values()}
    setup = judge(output, "heldout", range(50, 56)).setup
    alone = of_dataset(there, [nodes["sft"]], setup)
    assert sorted(m[-1]["content"] for m in alone) == [f"question {i}" for i in range(50, 60)]
    assert alone == of_dataset(there, [nodes["sft"]], setup)
    both = of_dataset(there, [nodes["sft"], nodes["sft-2"]], setup)
    assert sorted(m[-1]["content"] for m in both) == [f"question {i}" for i in range(51, 60)]


def test_prompts_with_pictures_are_not_judged(fresh: Callable[[], Path]) -> None:
    output = fresh()
    life = Lifecycle.resumed(output)
    picture = {"sha256": "ab" * 32, "width": 8, "height": 8}
    one = Example("1", "c", [{"role": "user", "content": "<image>?", "pictures": [picture]}], "a")
    data = {"train.arrow": pair_file(Example, [one]), "heldout.arrow": pair_file(Example), "stats.json": b"{}"}
    life.add("prepare-2", "prepare", data, {}, seed=2)
    there = open_lineage_store(output, None)
    nodes = {node.manifest.stage: node for node in there.graph.nodes.values()}
    setup = judge(output).setup.model_copy(update={"source": nodes["prepare-2"].sha256})
    with pytest.raises(ConfigError, match=r"^--prompts: 'train' is not allowed: prompts have pictures"):
        of_dataset(there, [nodes["sft"]], setup)


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "reward"],
        ["chat", "sft", "--temperature", "0"],
        ["compare", "sft", "prepare"],
        ["compare", "sft", "sft"],
        ["compare", "sft", "ppo-2", "--prompts", "some"],
        ["compare", "sft", "ppo-2", "--temperature", "-1"],
        ["preferences"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], untouched: Path, message_texts: Messages) -> None:
    result = xray(*arguments, "--output", untouched)
    assert result.exit_code == 2
    message_texts.check(result.stderr.replace(str(untouched), "OUTPUT"))
    assert len(result.stderr.strip().splitlines()) == 1


def test_people_judge_an_evaluation(fresh: Callable[[], Path]) -> None:
    output = fresh()
    judge(output, "heldout", range(50, 56))
    judge(output, "train")
    verdicts = published(output)
    nodes = {n.manifest.stage: n.directory for n in open_lineage_store(output, None).graph.nodes.values()}
    found = human_judge(verdicts, {"after": nodes["ppo-2"], "before": nodes["sft"]}, nodes["prepare"])
    # b, the policy, wins one of five held-out prompts, and half of the tie and of "both bad"; one was skipped.
    assert (found["samples"], found["win_rate"], found["delta"]) == (5, pytest.approx(0.4), pytest.approx(-0.2))
    assert (found["score_before"], found["score_after"]) == (pytest.approx(0.6), pytest.approx(0.4))
    assert (found["won"], found["lost"], found["tied"]) == (1, 2, 2)
    # Wilson's interval of 2 in 5.
    assert found["win_rate_ci95"] == pytest.approx([0.1176, 0.7693], abs=1e-4)
    assert found["delta_ci95"] == pytest.approx([2 * bound - 1 for bound in found["win_rate_ci95"]])
    sides = {"candidate": nodes["sft"], "champion": nodes["ppo-2"]}
    other = human_judge(verdicts, sides, nodes["prepare"])
    assert (other["win_rate"], other["score_candidate"]) == (pytest.approx(0.6), pytest.approx(0.6))
    # Without question 50, which the first won: one of four, and half of two.
    fewer = human_judge(verdicts, sides, nodes["prepare"], TextSet(["question 50"]))
    assert (fewer["samples"], fewer["win_rate"]) == (4, pytest.approx(0.5))
    with pytest.raises(
        ValueError, match=r"verdicts: judgements-\w+ has no verdict on replies of ppo-1-\w+ and sft-\w+ to held"
    ):
        human_judge(verdicts, {"after": nodes["ppo-1"], "before": nodes["sft"]}, nodes["prepare"])


def test_people_do_not_judge_on_training_prompts(fresh: Callable[[], Path]) -> None:
    output = fresh()
    judge(output, "train")
    nodes = {n.manifest.stage: n.directory for n in open_lineage_store(output, None).graph.nodes.values()}
    with pytest.raises(ValueError, match=r"to held-out prompts of prepare-\w+: make some with `xray compare`"):
        human_judge(published(output), {"after": nodes["ppo-2"], "before": nodes["sft"]}, nodes["prepare"])
