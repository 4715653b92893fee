"""Two of three people: a promotion needs approvals that each signed with a key of their own."""

from __future__ import annotations

import hashlib
import subprocess
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.trust.promoting import broken
from tests.unit.trust.synthetic import NAME, Lifecycle, copied
from xray.cli.main import app
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import new_private_key
from xray_runtime.kernel.evidence.kinds.approval import LogApprovals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import START, Left, LogView
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust import approvals as module
from xray_runtime.trust.approvals import approve, check_approvals
from xray_runtime.trust.gates import NotPromoted
from xray_runtime.trust.log import append
from xray_runtime.trust.promotion import PromotionReview, promote, review

PEOPLE = ("ada", "bo", "cy")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Person → private key; `eve` is not listed."""
    folder, found = tmp_path_factory.mktemp("people"), {}
    for person in (*PEOPLE, "eve"):
        found[person] = folder / f"{person}.pem"
        found[person].write_bytes(new_private_key())
    return found


def digest(private: Path) -> str:
    """As docs/promoting.md says."""
    public = subprocess.run(["openssl", "pkey", "-in", private, "-pubout"], capture_output=True, check=True).stdout
    return hashlib.sha256(public).hexdigest()


@pytest.fixture(scope="module")
def made(keys: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    gates = {"approvals": 2, "approvers": [digest(keys[name]) for name in PEOPLE], "min_win_rate": None}
    return Lifecycle(tmp_path_factory.mktemp("approvals") / "run").whole(gates=gates).output


@pytest.fixture
def candidate(made: Path, tmp_path: Path) -> Path:
    """A lifecycle whose config asks for two of three people."""
    return copied(made, tmp_path / "run")


def approved(output: Path, *people: Path, name: str = NAME) -> None:
    sha256 = resolve("ppo-2", output, None)[1].sha256
    for key in people:
        approve(output, name=name, checkpoint=sha256, key=key, by=key.stem, note="read its evaluation")


def reviewed(output: Path, gates: PromotionConfig | None = None) -> PromotionReview:
    store, node = resolve("ppo-2", output, None)
    return review(store, node, name=NAME, gates=gates)


def test_two_of_three_promote(candidate: Path, keys: dict[str, Path]) -> None:
    approved(candidate, keys["ada"], keys["cy"])
    seen = reviewed(candidate)
    [gate] = [gate for gate in seen.gates if gate.name == "approvals"]
    assert gate.reason.startswith("approved by ada (")
    promote(open_lineage_store(candidate, None), seen, by="ada", note="good")
    assert broken(candidate) == []


@pytest.mark.parametrize("people", [(), ("ada",), ("ada", "ada"), ("ada", "eve")])
def test_fewer_do_not(people: tuple[str, ...], candidate: Path, keys: dict[str, Path]) -> None:
    approved(candidate, *(keys[person] for person in people))
    with pytest.raises(NotPromoted, match="2 of 3 people must"):
        reviewed(candidate)


def test_an_approval_of_another_model_does_not_count(candidate: Path, keys: dict[str, Path]) -> None:
    approved(candidate, keys["ada"])
    approved(candidate, keys["bo"], name="another")
    with pytest.raises(NotPromoted, match="2 of 3 people must"):
        reviewed(candidate)


def test_an_approval_cannot_be_given_for_another(candidate: Path, keys: dict[str, Path]) -> None:
    approved(candidate, keys["ada"], keys["eve"])
    by_ada, by_eve = view(candidate).state(LogApprovals).given
    bo = subprocess.run(["openssl", "pkey", "-in", keys["bo"], "-pubout"], capture_output=True, check=True).stdout
    append(candidate, by_eve.model_copy(update={"key": bo.decode()}))
    append(candidate, by_ada.model_copy(update={"checkpoint": "0" * 64}))
    assert [line.partition(" ")[0] for line in broken(candidate)] == ["approval-invalid"] * 2
    with pytest.raises(NotPromoted):
        reviewed(candidate)


def test_an_approval_counts_in_its_own_directory_only(candidate: Path, keys: dict[str, Path], tmp_path: Path) -> None:
    """Others may have a model of the same name and bytes, and other evidence of it."""
    other, copy = tmp_path / "other", copied(candidate, tmp_path / "copy")
    append(other, Left(note="a log of its own"))
    append(copy, Left(note="what the original does not have"))
    approved(candidate, keys["ada"])
    sha256 = resolve("ppo-2", candidate, None)[1].sha256
    for output, person in ((other, "bo"), (copy, "cy")):
        approve(output, name=NAME, checkpoint=sha256, key=keys[person], by=person, note="read its evaluation")
        # The holder of this directory's key adds it to this log.
        append(candidate, view(output).state(LogApprovals).given[-1])
    found = [line.rpartition(": ")[2] for line in broken(candidate) if line.startswith("approval-invalid ")]
    assert set(found) == {"it was given for another log"}
    with pytest.raises(NotPromoted, match="the audit found approval-invalid"):
        reviewed(candidate)
    gates = PromotionConfig(approvals=2, approvers=[digest(keys[name]) for name in PEOPLE])
    assert check_approvals(view(candidate), NAME, sha256, gates).reason == (
        f"approved by ada ({digest(keys['ada'])[:12]}); 2 of 3 people must"
    )
    with pytest.raises(ConfigError, match="--withdraw: this key has not approved"):
        withdraw(candidate, keys["bo"])


@pytest.mark.parametrize("head", ["0:" + START, "-1:" + START, "1:" + START, "x"])
def test_an_approval_for_no_log_does_not_count(
    head: str, candidate: Path, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(LogView):
        @property
        def head(self) -> Any:
            return head

    monkeypatch.setattr(module, "view", lambda _: Other())
    approved(candidate, keys["ada"])
    monkeypatch.undo()
    assert [line.partition(" ")[0] for line in broken(candidate)] == ["approval-invalid"]


def withdraw(output: Path, key: Path) -> None:
    sha256 = resolve("ppo-2", output, None)[1].sha256
    approve(output, name=NAME, checkpoint=sha256, key=key, by=key.stem, note="saw more", withdrawn=True)


def test_a_withdrawn_approval_does_not_count(candidate: Path, keys: dict[str, Path]) -> None:
    approved(candidate, keys["ada"], keys["bo"])
    seen = reviewed(candidate)
    withdraw(candidate, keys["bo"])
    assert [given.action for given in view(candidate).state(LogApprovals).given] == ["approve"] * 2 + ["approve-end"]
    with pytest.raises(NotPromoted, match=r"approved by ada \([0-9a-f]{12}\); 2 of 3 people must"):
        reviewed(candidate)
    # Nor where it was withdrawn while a person decided.
    with pytest.raises(NotPromoted, match="2 of 3 people must"):
        promote(open_lineage_store(candidate, None), seen, by="eve", note="good")
    assert broken(candidate) == []
    approved(candidate, keys["bo"])
    reviewed(candidate)


def test_a_withdrawn_approval_cannot_be_logged_again(candidate: Path, keys: dict[str, Path]) -> None:
    approved(candidate, keys["ada"], keys["bo"])
    by_bo = view(candidate).state(LogApprovals).given[1]
    withdraw(candidate, keys["bo"])
    append(candidate, by_bo)
    with pytest.raises(NotPromoted, match="2 of 3 people must"):
        reviewed(candidate)
    # An approval is no withdrawal, and a withdrawal no approval.
    withdrawn = view(candidate).state(LogApprovals).given[2]
    append(candidate, withdrawn.model_copy(update={"action": "approve"}))
    assert [line.partition(" ")[0] for line in broken(candidate)] == ["approval-invalid"]
    with pytest.raises(ValueError, match="signed for another action"):
        module.verified(by_bo.model_copy(update={"action": "approve-end"}), view(candidate))


def test_a_withdrawal_counts_though_the_clock_was_set_back(
    candidate: Path, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    approved(candidate, keys["ada"], keys["bo"])

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(2020, 1, 1, tzinfo=tz)

    monkeypatch.setattr(module, "datetime", Earlier)
    withdraw(candidate, keys["bo"])
    with pytest.raises(NotPromoted, match="2 of 3 people must"):
        reviewed(candidate)


def test_only_an_approval_of_ones_own_is_withdrawn(candidate: Path, keys: dict[str, Path]) -> None:
    approved(candidate, keys["ada"])
    with pytest.raises(ConfigError, match="--withdraw: this key has not approved"):
        withdraw(candidate, keys["bo"])
    withdraw(candidate, keys["ada"])
    with pytest.raises(ConfigError, match="--withdraw: this key has not approved"):
        withdraw(candidate, keys["ada"])


@pytest.mark.parametrize("gates", [{"approvals": None}, {"approvals": 1, "approvers": ["0" * 64]}, {"approvers": []}])
def test_it_cannot_be_overridden(gates: dict[str, object], candidate: Path) -> None:
    with pytest.raises(ConfigError, match="only the lifecycle's config sets it"):
        reviewed(candidate, PromotionConfig.model_validate(gates))


def test_another_evaluation_does_not_take_them_back(candidate: Path, keys: dict[str, Path]) -> None:
    asked = [f"question {i}" for i in range(51, 57)]
    Lifecycle.resumed(candidate).evaluate(asked, stage="evaluate-2", gates={"min_win_rate": None})
    approved(candidate, keys["ada"])
    with pytest.raises(NotPromoted, match="2 of 3 people must"):
        reviewed(candidate)
    approved(candidate, keys["bo"])
    assert [gate.name for gate in reviewed(candidate).gates].count("approvals") == 1


def test_approvers_whom_nobody_asks_are_refused() -> None:
    with pytest.raises(ValueError, match="approvals must be set, since approvers are"):
        PromotionConfig(approvers=["0" * 64])


def test_more_than_there_are_people_is_refused() -> None:
    with pytest.raises(ValueError, match="approvals = 2 must be at most 1"):
        PromotionConfig(approvals=2, approvers=["0" * 64, "0" * 64])


def test_the_command(candidate: Path, keys: dict[str, Path], tmp_path: Path) -> None:
    common = ["approve", "ppo-2", "--output", str(candidate), "--name", NAME, "--note", "fine", "--by", "Ada"]
    done = CliRunner().invoke(app, [*common, "--key", str(keys["ada"])])
    assert (done.exit_code, digest(keys["ada"]) in done.output.replace("\n", "")) == (0, True)
    for code, said in ((0, "Ada no longer approves"), (2, "--withdraw: this key has not approved")):
        done = CliRunner().invoke(app, [*common, "--withdraw", "--key", str(keys["ada"])])
        assert (done.exit_code, said in done.output) == (code, True)
    done = CliRunner().invoke(app, [*common, "--name", "chatt", "--key", str(keys["bo"])])
    assert (done.exit_code, "--name: 'chatt' has no version" in done.output) == (2, True)
    (tmp_path / "none.pem").write_text("none")
    for name in ("none.pem", "missing.pem"):
        done = CliRunner().invoke(app, [*common, "--key", str(tmp_path / name)])
        assert (done.exit_code, "--key:" in done.output) == (2, True)
