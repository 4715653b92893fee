"""The commands' manners: what they print, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.message_texts import Messages
from tests.unit.trust.commands import place, xray
from tests.unit.trust.synthetic import NAME, Lifecycle


def test_the_tree_names_every_ancestor_and_what_was_made_from_it(untouched: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    tree = xray("lineage", place(untouched, "ppo-1"), "--descendants", "--html", page)
    assert tree.exit_code == 0
    for stage in ("ppo-1", "rewards.0: reward", "policy+reference: sft", "data: prepare", "policy: ppo-2", "evaluate"):
        assert stage in tree.output
    html = page.read_text()
    assert html.count("<section") == 8
    assert "<script" not in html
    content = json.loads(xray("lineage", "ppo-2", "--output", untouched, "--json").output)
    assert content["checkpoints"][0]["stage"] == "prepare"
    assert content["checkpoints"][-1]["sha256"] == content["of"]


def test_every_form_of_reference_names_the_same(untouched: Path) -> None:
    directory = place(untouched, "ppo-2")
    sha = json.loads(xray("lineage", directory, "--json").output)["of"]
    uri = f"sqlite:///{untouched / 'mlflow.db'}"
    forms = [
        (sha[:8], "--output", untouched),
        ("ppo-2", "--output", untouched),
        (directory.name, "--output", untouched),
        ("synthetic-policy@candidate", "--tracking-uri", uri),
        ("synthetic-policy/1", "--output", untouched),
    ]
    for form in forms:
        assert json.loads(xray("lineage", *form, "--json").output)["of"] == sha


def test_a_difference_shows_causes(untouched: Path) -> None:
    text = xray("diff", "ppo-1", "ppo-2", "--output", untouched).output
    assert "policy: sft → ppo-1" in text
    assert json.loads(xray("diff", "sft", "sft", "--output", untouched, "--json").output)["same"]


def test_an_audit_exits_by_what_it_found(fresh: Callable[[], Path]) -> None:
    output = fresh()
    assert xray("audit", "ppo-2", "--output", output).exit_code == 0
    assert xray("audit", "--all", "--output", output, "--no-hash").exit_code == 0
    weights = place(output, "sft") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    broken = xray("audit", place(output, "ppo-2"), "--json")
    assert broken.exit_code == 1
    codes = [finding["code"] for finding in json.loads(broken.output)["findings"] if finding["broken"]]
    assert codes == ["file-changed"]
    assert xray("audit", "ppo-2", "--output", output, "--no-hash").exit_code == 0
    (place(output, "sft") / "manifest.json").write_text("{")
    unreadable = xray("audit", place(output, "sft"))
    assert unreadable.exit_code == 1
    assert "manifest-malformed" in unreadable.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit"],
        ["audit", "x", "--all"],
        ["audit", "--all"],
        ["audit", "nothing"],
        ["audit", "nothing", "--output", "{output}"],
        ["audit", "--all", "--output", "/nowhere"],
        ["audit", "ppo-2", "--output", "{output}", "--public-key", "/nowhere"],
        ["lineage", "{output}"],
        ["lineage", "no-model@alias", "--output", "{output}"],
        ["promote", "--output", "{output}", "--name", "m", "--note", "n"],
        ["promote", "ppo-2", "--output", "{output}", "--name", "m"],
        ["promote", "ppo-2", "--output", "{output}", "--name", "m", "--note", "n", "--set", "sft.lr=1"],
        ["promote", "ppo-2", "--output", "{output}", "--name", "m", "--note", "n", "--set", "promotion.max_kl=-1"],
        ["import", "/nowhere.tar", "--output", "{output}"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], fresh: Callable[[], Path], message_texts: Messages
) -> None:
    output = str(fresh())
    result = xray(*(argument.replace("{output}", output) for argument in arguments))
    assert result.exit_code == 2
    message_texts.check(result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1


def test_prune_shows_before_it_removes(fresh: Callable[[], Path]) -> None:
    output = fresh()
    assert "0 of 8 checkpoints" in xray("prune", "--output", output).output
    Lifecycle(output, tracking=False).add("trial", "ppo", {"x": b"trial"}, {})
    assert "would remove  trial" in xray("prune", "--output", output).output
    for kept in ("trial", str(next(output.glob("checkpoints/trial-*")))):
        assert "0 of 9 checkpoints" in xray("prune", "--output", output, "--keep", kept).output
    assert "would remove  trial" in xray("prune", "--output", output, "--keep", f"{NAME}@candidate").output


def test_export_audit_import(fresh: Callable[[], Path], tmp_path: Path) -> None:
    bundle, output = tmp_path / "policy.tar", fresh()
    assert "8 checkpoints" in xray("export", "ppo-2", bundle, "--output", output).output
    assert xray("audit", bundle).exit_code == 0
    unknown = xray("import", bundle, "--output", tmp_path / "other")
    assert (unknown.exit_code, "which is not trusted here" in unknown.output) == (2, True)
    key = output / "keys" / "signing.pub"
    assert xray("import", bundle, "--output", tmp_path / "other", "--public-key", key).exit_code == 0
    assert xray("audit", "--all", "--output", tmp_path / "other").exit_code == 0
