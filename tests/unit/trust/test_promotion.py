"""Promotion: a candidate becomes champion when its audit is sound, every gate holds and a person agrees."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tests.unit.trust.promoting import aliases, broken, promoted, second_candidate
from tests.unit.trust.synthetic import NAME, Lifecycle, copied, decided, evaluation_files, examples, judged, judged_by
from tests.unit.trust.tampering import place, restated
from xray.flows.promote import review_markdown
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import END, LOG
from xray_runtime.kernel.evidence.view import Left
from xray_runtime.kernel.history.reference import LineageStore, champion_of, open_lineage_store, resolve
from xray_runtime.methods.evaluate.config import EvaluationConfig, PromotionConfig
from xray_runtime.trust.gates import check_gates, gates_for
from xray_runtime.trust.log import append, choose_witness
from xray_runtime.trust.promotion import (
    NotPromoted,
    PromotionReview,
    comparison_spec,
    decline,
    promote,
    review,
    roll_back,
)
from xray_runtime.trust.signing import signing_key


@pytest.fixture(scope="module")
def made(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = copied(untouched, tmp_path_factory.mktemp("champion") / "run")
    promoted(output, "ppo-2", min_win_rate=None)
    second_candidate(output)
    return output


@pytest.fixture
def second(made: Path, tmp_path: Path) -> Path:
    """ppo-2 is champion, and ppo-3 a candidate that was compared with it."""
    return copied(made, tmp_path / "second")


def test_a_sound_candidate_is_promoted_and_rolled_back(second: Path) -> None:
    output = second
    assert aliases(output) == {"candidate": "2", "champion": "1"}
    promoted(output, "ppo-3", "compare", min_win_rate=0.4, max_regression=0.2)
    assert aliases(output) == {"candidate": "2", "champion": "2", "previous": "1"}
    assert broken(output) == []
    decision = roll_back(open_lineage_store(output, None), name=NAME, by="a person", note="worse than it looked")
    assert decision.version == "1"
    assert aliases(output) == {"candidate": "2", "champion": "1", "previous": "2"}
    assert broken(output) == []
    chain = decided(output)
    assert [d["action"] for d in chain] == ["register", "promote", "register", *["promote"] * 2, *["rollback"] * 2]
    assert chain[4]["evidence"].keys() == {"evaluation", "comparison"}
    assert {gate["name"] for gate in chain[4]["gates"]} >= {"min_win_rate", "max_regression"}
    assert re.fullmatch(r"the defaults: .*; set by hand: max_regression, min_win_rate", chain[4]["gates_from"])
    assert [(d["alias"], d["version"]) for d in chain[3:]] == [
        *[("previous", "1"), ("champion", "2")],
        *[("previous", "2"), ("champion", "1")],
    ]
    assert [(d["by"], d["note"]) for d in chain[3:]] == [
        *[("a person", "looks good")] * 2,
        *[("a person", "worse than it looked")] * 2,
    ]
    # Nothing is checked of who was champion before.
    assert (chain[6]["gates"], chain[6]["gates_from"], chain[6]["evidence"]) == ([], "", {})


def test_a_witness_that_does_not_vouch_for_the_log_refuses(second: Path, tmp_path: Path) -> None:
    """Gone; then back, and the log set back to before its last entry, as the key's owner signed it then."""
    witness = tmp_path / "witness"
    choose_witness(second, str(witness), None, by="Ada")
    gates = {"min_win_rate": 0.4, "max_regression": 0.2}
    witness.rename(tmp_path / "away")
    with pytest.raises(NotPromoted, match="witness-silent"):
        promoted(second, "ppo-3", "compare", **gates)
    (tmp_path / "away").rename(witness)
    before = {name: (second / name).read_bytes() for name in (LOG, END)}
    append(second, Left(note="newest"))
    kept = {name: (second / name).read_bytes() for name in before}
    for name, content in before.items():
        (second / name).write_bytes(content)
    with pytest.raises(NotPromoted, match="log-shorter"):
        promoted(second, "ppo-3", "compare", **gates)
    assert aliases(second) == {"candidate": "2", "champion": "1"}
    for name, content in kept.items():
        (second / name).write_bytes(content)
    promoted(second, "ppo-3", "compare", **gates)
    assert aliases(second)["champion"] == "2"
    witness.rename(tmp_path / "away")
    with pytest.raises(NotPromoted, match="witness-silent"):
        roll_back(open_lineage_store(second, None), name=NAME, by="a person", note="worse than it looked")


def test_prefect_gets_no_texts(fresh: Callable[[], Path]) -> None:
    place, node = resolve("ppo-2", fresh(), None)
    seen = review(place, node, name=NAME, gates=PromotionConfig(min_win_rate=None))
    # At the terminal the person sees some.
    assert "question 5" in review_markdown(seen, place)
    kept = review_markdown(seen, place, samples=False)
    assert "question" not in kept
    assert "samples.json" in kept


def test_a_promotion_cut_short_is_finished_by_the_same_command(fresh: Callable[[], Path]) -> None:
    output = fresh()
    promoted(output, "ppo-2", min_win_rate=None)
    uri = f"sqlite:///{output / 'mlflow.db'}"
    mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri).delete_registered_model_alias(NAME, "champion")
    assert [text.split()[0] for text in broken(output)] == ["alias-moved"]
    place, node = resolve("ppo-2", output, None)
    seen = PromotionReview(NAME, "1", node, champion_of(place, NAME), [], "", {}, list)
    promote(place, seen, by="a person", note="again")
    assert broken(output) == []
    assert len(decided(output)) == 2


def test_who_declines_is_recorded_and_moves_nothing(fresh: Callable[[], Path]) -> None:
    output = fresh()
    place, node = resolve("ppo-2", output, None)
    seen = review(place, node, name=NAME, gates=PromotionConfig(min_win_rate=None))
    decline(place, seen, by="a person", note="it flatters")
    assert aliases(output) == {"candidate": "1"}
    assert broken(output) == []
    said = decided(output)[1]
    assert (said["action"], said["name"], said["alias"], said["version"]) == ("decline", NAME, "champion", "1")
    assert (said["checkpoint"], said["by"], said["note"]) == (node.sha256, "a person", "it flatters")
    # What the person saw.
    assert [gate["name"] for gate in said["gates"]] == ["max_kl", "max_length_ratio", "max_judge_drop"]
    assert said["gates_from"].startswith("the defaults: evaluate")
    assert said["evidence"] == {"evaluation": resolve("evaluate", output, None)[1].sha256}


def test_two_who_decide_at_the_same_time(fresh: Callable[[], Path]) -> None:
    output = fresh()
    place, node = resolve("ppo-2", output, None)
    seen = review(place, node, name=NAME, gates=PromotionConfig(min_win_rate=None))
    promote(place, seen, by="the first", note="")
    with pytest.raises(NotPromoted, match="another champion was chosen in the meantime"):
        promote(place, seen, by="the second", note="")


def test_a_previous_champion_that_is_missing_or_changed_is_not_rolled_back_to(second: Path) -> None:
    output = second

    def back() -> None:
        roll_back(open_lineage_store(output, None), name=NAME, by="a person", note="")

    with pytest.raises(ConfigError, match="--rollback: 'synthetic-policy' has no previous champion"):
        back()
    promoted(output, "ppo-3", "compare", min_win_rate=None, max_regression=0.2)
    [weights] = output.glob("checkpoints/ppo-2-*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(NotPromoted, match=r"file-changed \(ppo-2"):
        back()
    shutil.rmtree(weights.parent)
    with pytest.raises(NotPromoted, match=r"the previous champion \w{12} is not in the store"):
        back()
    assert aliases(output)["champion"] == "2"


def test_a_candidate_is_a_version_of_that_name(fresh: Callable[[], Path]) -> None:
    place, node = resolve("ppo-1", fresh(), None)
    with pytest.raises(ConfigError, match=rf"--name: '{NAME}' has no version with checkpoint {node.sha256[:12]}"):
        review(place, node, name=NAME)


def test_a_candidate_of_another_signer_is_not_promoted(fresh: Callable[[], Path], tmp_path: Path) -> None:
    place, node = resolve("ppo-2", fresh(), None)
    signing_key(tmp_path / "other")
    with pytest.raises(NotPromoted, match=r"the audit found signature-foreign \(ppo-2"):
        review(place, node, name=NAME, public=tmp_path / "other" / "keys" / "signing.pub")


@pytest.mark.parametrize(
    ("gates", "reason"),
    [
        (
            {"min_win_rate": 0.5},
            # 24 of 40; it takes more than 3.84 / 4 / 0.1² = 96.04.
            "gold: 24 won, 16 lost, 0 tied; win rate 0.600 of those not tied, 95% from 0.446 (at this rate "
            "about 57 more prompts are needed); must be above 0.5",
        ),
        ({"min_win_rate": None, "max_kl": 1.0}, "KL 1.250; at most 1.0"),
        ({"min_win_rate": None, "max_length_ratio": 1.1}, "length 8.0 → 10.0; ratio at most 1.1"),
        ({"min_win_rate": None}, "reward +1.000, score -0.100 (gold); a fall of at most 0.0"),
    ],
)
def test_a_gate_that_does_not_hold_stops_it(
    gates: dict[str, float | None], reason: str, fresh: Callable[[], Path], tmp_path: Path
) -> None:
    output = fresh()
    if "score" in reason:
        output = tmp_path / "hacked"
        Lifecycle(output).whole(gold_delta=-0.1)
    with pytest.raises(NotPromoted) as error:
        promoted(output, "ppo-2", **gates)
    assert error.value.reasons == [reason]
    assert "champion" not in aliases(output)


RECORDED = {"max_kl": 1.0, "min_win_rate": None, "max_judge_drop": None}


def test_the_gates_are_those_of_the_lifecycle_that_made_the_candidate(fresh: Callable[[], Path]) -> None:
    output = fresh()
    store, node = resolve("ppo-2", output, None)
    seen = review(store, node, name=NAME, gates=PromotionConfig(min_win_rate=None))
    assert re.fullmatch(r"the defaults: evaluate \w+ has none on record; set by hand: min_win_rate", seen.gates_from)
    Lifecycle.resumed(output).evaluate(
        [f"question {i}" for i in range(51, 57)], stage="evaluate-2", gates=PromotionConfig(**RECORDED).model_dump()
    )
    # Whatever config the directory was last run with.
    (output / "config.yaml").write_text("promotion: {max_kl: 20}\n")
    with pytest.raises(NotPromoted) as error:
        promoted(output, "ppo-2")
    assert error.value.reasons == ["KL 1.250; at most 1.0"]
    promoted(output, "ppo-2", max_kl=1.5)
    last = decided(output)[-1]
    assert re.fullmatch(r"as evaluate-2 \w+ has them on record; set by hand: max_kl", last["gates_from"])
    assert [gate["name"] for gate in last["gates"]] == ["max_kl", "max_length_ratio"]


def test_unsigned_gates_do_not_count(fresh: Callable[[], Path]) -> None:
    output = fresh()
    gates = {"gates": {"min_win_rate": 0.0}}
    change = lambda content: content["predicate"]["runDetails"]["xray_run"].update(gates)  # noqa: E731
    restated(place(output, "evaluate-*"), change, None)
    store, node = resolve("ppo-2", output, None)
    with pytest.raises(NotPromoted, match="does not vouch for its gates"):
        gates_for(store, node, None, None)


def test_gates_of_another_signer_do_not_count(fresh: Callable[[], Path], tmp_path: Path) -> None:
    store, node = resolve("ppo-2", fresh(), None)
    signing_key(tmp_path / "other")
    with pytest.raises(NotPromoted, match="does not vouch for its gates"):
        gates_for(store, node, None, tmp_path / "other" / "keys" / "signing.pub")
    assert gates_for(store, node, None, store.output / "keys" / "signing.pub").origin.startswith("the defaults")


def test_who_was_never_evaluated_has_no_gates(fresh: Callable[[], Path]) -> None:
    store, node = resolve("ppo-1", fresh(), None)
    with pytest.raises(NotPromoted, match=r"^not promoted: the candidate has no evaluation in the store$"):
        gates_for(store, node, None, None)


NAN = float("nan")


@pytest.mark.parametrize(
    ("numbers", "gate", "reason"),
    [
        ({"judges": {"gold": judged(0.6, 0.2) | {"won": NAN}}}, "min_win_rate", "won by gold of .* is NaN"),
        ({"judges": {"gold": judged(0.6, 0.2) | {"tied": None}}}, "min_win_rate", "tied by gold of .* is null"),
        ({"judges": {"gold": judged(0.6, 0.2) | {"lost": True}}}, "min_win_rate", "lost by gold of .* is true"),
        ({"judges": {"gold": {"judges": True, "delta": 0.2}}}, "min_win_rate", "won by gold of .* is null"),
        (
            {"judges": {"gold": judged(0.5, 0.0) | {"won": 0, "lost": 0, "tied": 40}}},
            "min_win_rate",
            "^gold: all 40 prompts are tied, which shows no improvement; must be above 0.1$",
        ),
        ({"kl": NAN}, "max_kl", "kl of .* is NaN"),
        ({"length_after": None}, "max_length_ratio", "length_after of .* is null"),
        ({"judges": {"gold": judged(0.6, NAN)}}, "max_judge_drop", "delta by gold of .* is NaN"),
        ({"reward_after": NAN}, "max_judge_drop", "reward_after of .* is NaN"),
    ],
)
def test_a_gate_without_its_numbers_does_not_hold(
    numbers: dict[str, Any], gate: str, reason: str, tmp_path: Path
) -> None:
    life = Lifecycle(tmp_path, tracking=False).whole()
    life.evaluate([f"question {i}" for i in range(51, 57)], stage="evaluate-2", numbers=numbers)
    graph = open_lineage_store(tmp_path, None).graph
    evaluation = next(node for node in graph.nodes.values() if node.manifest.stage == "evaluate-2")
    gates = PromotionConfig(min_win_rate=0.1)
    candidate = graph.nodes[evaluation.manifest.parents["policy"]]
    failed = [g for g in check_gates(graph, candidate, evaluation, None, None, gates) if not g.passed]
    assert [g.name for g in failed] == [gate]
    assert re.search(reason, failed[0].reason)


def test_a_candidate_worse_than_the_champion_is_stopped(second: Path) -> None:
    with pytest.raises(NotPromoted, match="the candidate was not compared with the champion"):
        promoted(second, "ppo-3", min_win_rate=None)
    # 20 of 40 begin at 0.352.
    reason = r"over the champion gold: 20 won, 20 lost, 0 tied; win rate 0.500 with ties by half, 95% from 0.352"
    with pytest.raises(NotPromoted, match=reason):
        promoted(second, "ppo-3", "compare", min_win_rate=None)
    promoted(second, "ppo-3", "compare", min_win_rate=None, max_regression=0.15)


def test_a_changed_comparison_is_not_used(second: Path) -> None:
    [path] = second.glob("checkpoints/compare-*/comparison.json")
    path.write_text(path.read_text().replace("0.5", "0.9"))
    with pytest.raises(NotPromoted, match=r"the audit found .*\(compare"):
        promoted(second, "ppo-3", "compare", min_win_rate=None, max_regression=0.2)


def test_a_comparison_on_what_the_champion_was_trained_on_is_found(fresh: Callable[[], Path]) -> None:
    output = fresh()
    lifecycle = Lifecycle.resumed(output)
    lifecycle.add("ppo-4", "ppo", {"model.safetensors": b"4"}, {"policy": "sft", "rewards.0": "reward"})
    lifecycle.add("other", "prepare", {"train.arrow": examples(range(58, 70))}, {})
    lifecycle.add("ppo-5", "ppo", {"model.safetensors": b"5"}, {"policy": "sft", "prompts": "other"})
    lifecycle.compare("ppo-4", "ppo-5", [f"question {i}" for i in range(52, 60)], stage="compare-5")
    assert [text.split()[0] for text in broken(output)] == ["evaluation-overlap"]


def test_who_is_compared_with_whom(fresh: Callable[[], Path]) -> None:
    output = fresh()
    lifecycle = Lifecycle.resumed(output)
    lifecycle.add("other", "prepare", {"train.arrow": examples(range(58, 70))}, {})
    lifecycle.add("ppo-5", "ppo", {"model.safetensors": b"5"}, {"policy": "sft", "prompts": "other"})
    place, node = resolve("ppo-2", output, None)
    spec = comparison_spec(place.graph, node, lifecycle.done["ppo-5"].sha256)
    stages = {role: place.graph.nodes[sha].manifest.stage for role, sha in spec.parents.items()}
    assert stages == {
        "policy": "ppo-2",
        "champion": "ppo-5",
        "prompts": "prepare",
        "rewards.0": "reward",
        "seen.0": "other",
    }
    assert EvaluationConfig.model_validate(spec.config).rewards[0].model == "rewards.0"
    assert (spec.seed, spec.runtime) == (0, {"device": "cpu", "threads": 2})
    judged = comparison_spec(place.graph, node, lifecycle.done["ppo-5"].sha256, "5" * 64)
    assert judged.parents == spec.parents | {"verdicts": "5" * 64}


def test_an_evaluation_that_cannot_be_repeated_with_the_champion_says_why(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path, tracking=False).whole()
    answered, config = evaluation_files(["question 50"], 0.6, 0.2), judged_by(["question 50"], [])
    life.add("evaluate-1", "evaluate", answered, {"policy": "ppo-1", "against": "base"}, config)
    roles = {"policy": "sft", "against": "base", "prompts": "prepare"}
    life.add("evaluate-sft", "evaluate", answered, roles, config | {"num_promts": 8})
    graph, champion = open_lineage_store(tmp_path, None).graph, life.done["ppo-2"].sha256

    def told(stage: str, champion: str = champion) -> str:
        with pytest.raises(NotPromoted) as error:
            comparison_spec(graph, graph.nodes[life.done[stage].sha256], champion)
        return error.value.reasons[0]

    why = "its evaluation, of kind evaluate, cannot be repeated with the champion"
    assert told("ppo-1").startswith(f"{why} (prompts): set promotion.max_regression=null")
    assert told("sft").startswith(f"{why} (num_promts: unknown field")
    assert (
        told("ppo-2", "0" * 64) == "the champion 000000000000 is not in the store, so there is nothing to compare with"
    )
    assert told("base") == "the candidate has no evaluation in the store"


def test_an_unsound_candidate_is_not_promoted(fresh: Callable[[], Path]) -> None:
    output = fresh()
    weights = next(iter(output.glob("checkpoints/base-*/model.safetensors")))
    weights.write_bytes(b"other")
    with pytest.raises(NotPromoted, match=r"file-changed \(base"):
        promoted(output, "ppo-2", min_win_rate=None)


def test_places_without_mlflow_are_told_so(fresh: Callable[[], Path]) -> None:
    output = fresh()
    place, node = resolve("ppo-2", output, None)
    with pytest.raises(ConfigError, match="--tracking-uri"):
        review(LineageStore(place.output, place.graph, None), node, name=NAME, gates=PromotionConfig())
