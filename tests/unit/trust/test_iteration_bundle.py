"""Bundles of one iteration over the fake models of `unit.methods.ppo.loop`: packed, moved away, computed again."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.methods.ppo.loop import make_inputs
from tests.unit.trust import replayed
from tests.unit.trust.commands import xray
from tests.unit.trust.replayed import SURER, Published, SavingModel
from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.engines.states import Reader, write
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.kernel.store.shards import Piece
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.ledger_config import LedgerConfig
from xray_runtime.trust.iteration.bundle import BundleProblem, open_iteration
from xray_runtime.trust.iteration.pack import check_bundle, pack
from xray_runtime.trust.iteration.replay import IterationReplay, ReplayedPart, replay_iteration
from xray_runtime.trust.iteration.sample import cosine
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.published_log import publish_log, require_published
from xray_runtime.trust.replay import Replay
from xray_runtime.trust.replayable import replayable
from xray_runtime.trust.signing import KEY_VARIABLE, make_key, public_bytes

ONE = Piece.of((1,))
PARTS = ["replies", "log-probabilities", "rewards", "advantages", "loss", "gradient", "weights after"]
"""Those of the first iteration, before which no weights are sent, but for what is sent after it."""


class ShardedModel(SavingModel):
    """Its state is a shard as engines write it: what it has learned, and a moment of the optimizer."""

    def _save_state(self, directory: Path) -> None:
        pieces = {("weight", "w"): ONE, ("exp_avg", "w"): ONE}
        write(directory, 0, pieces, self.updates, lambda kind, name: torch.tensor([self.surer + (kind == "weight")]))

    def _load(self, directory: Path) -> None:
        self._note("load_state")
        with Reader(directory) as reader:
            self.updates = reader.step

    def _score(self, rows: TextBatch) -> Scores:
        found = super()._score(rows)
        return found.with_columns(entropy=found.logprobs) if self.role == "policy" else found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", replayed.__name__)


@pytest.fixture(scope="module")
def published(inputs: PPOInputs, tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XRAY_ALLOWED_IMPORTS", replayed.__name__)
        return Published(folder / "run", inputs, ShardedModel).make(folder / "made")


def packed(of: Published, path: Path, iteration: int, *, row: int | None = None, **world: Any) -> Replay:
    """Pack an iteration as `xray bundle` does."""
    store, node = resolve("ppo", of.output, None)
    stage = replayable(node, store.graph, iteration)
    check_bundle(store, stage, iteration, path, row)
    scratch = path.with_name(f"{path.name}-scratch")
    scratch.mkdir()
    return pack(store, stage, iteration, path, of.opener(of.world(**world)), scratch, row=row)


@pytest.fixture(scope="module")
def bundle(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iteration 2, with the page of row 1."""
    path = tmp_path_factory.mktemp("bundle") / "two.tar"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XRAY_ALLOWED_IMPORTS", replayed.__name__)
        assert packed(published, path, 2, row=1).is_same
    return path


def again(of: Published, path: Path, scratch: Path, recorded: str | None = None, **world: Any) -> IterationReplay:
    """Replay a bundle on a machine that has nothing else."""
    away = of.output.with_name("away")
    of.output.rename(away)
    scratch.mkdir()
    try:
        with open_iteration(path, None) as found:
            return replay_iteration(found, of.opener(of.world(**world)), scratch, lambda *_: None, recorded)
    finally:
        away.rename(of.output)


def verdicts(result: IterationReplay) -> dict[str, str]:
    return {part.name: part.verdict for part in result.parts}


def rewritten(path: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A bundle with changed members."""
    with tarfile.open(path) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    change(members)
    with tarfile.open(target, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target


def test_an_iteration_is_replayed_from_its_bundle_alone(published: Published, bundle: Path, tmp_path: Path) -> None:
    result = again(published, bundle, tmp_path / "again")
    assert result.is_same
    expected = ["weights before", *PARTS, "weights that were sent next"]
    assert verdicts(result) == dict.fromkeys(expected, "equal")
    assert result.to_json()["iteration"] == 2
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
    assert [name for name in names if "/ledger/" in name] == [
        f"checkpoints/{next(published.output.glob('checkpoints/ppo-*')).name}/ledger/{n:06d}.parquet" for n in (2, 3)
    ]
    assert not [name for name in names if name.startswith("snapshot/ledger")]
    assert not [name for name in names if name.endswith("signing.pem")], "the private key stays at home"


def test_only_that_iteration_is_computed(published: Published, bundle: Path, tmp_path: Path) -> None:
    world = published.world()
    scratch = tmp_path / "again"
    scratch.mkdir()
    with open_iteration(bundle, None) as found:
        replay_iteration(found, published.opener(world), scratch, lambda *_: None)
    assert [call for call in world.calls if call.startswith("generator")] == [
        *("generator follow 2", "generator generate 2", "generator follow 3")
    ]
    # Two epochs of two minibatches, and the critic's.
    assert world.calls.count("policy train") == 4


def test_the_first_iteration_needs_no_snapshot(published: Published, tmp_path: Path) -> None:
    path = tmp_path / "zero.tar"
    assert packed(published, path, 0).is_same
    result = again(published, path, tmp_path / "again")
    assert verdicts(result) == dict.fromkeys([*PARTS, "weights that were sent next"], "equal")
    with tarfile.open(path) as archive:
        assert not [name for name in archive.getnames() if name.startswith("snapshot")]


def test_the_last_iteration_ends_with_the_checkpoints_files(published: Published, tmp_path: Path) -> None:
    path = tmp_path / "last.tar"
    assert packed(published, path, 3).is_same
    result = again(published, path, tmp_path / "again")
    assert verdicts(result) == dict.fromkeys(["weights before", *PARTS, "files of the checkpoint"], "equal")


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("ledger/000002.parquet", "was changed"),
        ("snapshot/policy/rank-00000.safetensors", "was changed"),
        ("snapshot/state.json", "was changed"),
        ("checkpoints/rewards-0-", "was changed"),
        ("source/checkpoint", "was changed"),
        ("iteration.json", "the signature is not valid"),
    ],
)
def test_a_flipped_bit_is_a_finding_that_names_the_file(bundle: Path, tmp_path: Path, name: str, finding: str) -> None:
    flipped = ""

    def flip(members: dict[str, bytes]) -> None:
        nonlocal flipped
        flipped = next(member for member in sorted(members) if name in member)
        content = bytearray(members[flipped])
        if name == "iteration.json":
            # A bit of the payload, not of the JSON around it.
            envelope = json.loads(bytes(content))
            payload = envelope["payload"]
            envelope["payload"] = payload[:-9] + ("A" if payload[-9] != "A" else "B") + payload[-8:]
            members[flipped] = json.dumps(envelope).encode()
            return
        content[len(content) // 2] ^= 1
        members[flipped] = bytes(content)

    path = rewritten(bundle, tmp_path / "flipped.tar", flip)
    said = xray("replay", path)
    assert said.exit_code == 1
    assert f"BROKEN {flipped}: {finding}" in said.output
    assert "nothing was replayed" in said.output
    assert json.loads(xray("replay", path, "--json").stdout)["findings"] == [f"{flipped}: {finding}"]


def test_added_and_missing_files_are_findings(bundle: Path, tmp_path: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        del members["snapshot/state.json"]
        members["snapshot/more.json"] = b"{}"

    path = rewritten(bundle, tmp_path / "other.tar", change)
    with pytest.raises(BundleProblem) as raised, open_iteration(path, None):
        pass
    assert raised.value.findings == ["snapshot/more.json: was added", "snapshot/state.json: is missing"]


def test_the_key_may_be_named(published: Published, bundle: Path, tmp_path: Path) -> None:
    with open_iteration(bundle, published.output / "keys" / "signing.pub") as found:
        assert found.record.iteration == 2
    make_key(tmp_path / "other.pem")
    (tmp_path / "other.pub").write_bytes(public_bytes(tmp_path / "other.pem"))
    foreign = pytest.raises(BundleProblem, match=r"^iteration.json: it was signed with another key")
    with foreign, open_iteration(bundle, tmp_path / "other.pub"):
        pass
    # What is no key says nothing about the bundle.
    said = xray("replay", bundle, "--public-key", tmp_path / "other.pem")
    assert said.exit_code == 2
    assert "error: --public-key: " in said.output
    assert "other.pem: not a public key in PEM" in said.output


def test_other_rewards_are_named(
    published: Published, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward function that another machine has in another version."""
    monkeypatch.setattr(replayed, "judge", lambda prompts, replies: [len(reply) / 5 for reply in replies])
    result = again(published, bundle, tmp_path / "again")
    assert not result.is_same
    equal = [name for name, verdict in verdicts(result).items() if verdict == "equal"]
    assert equal[:3] == ["weights before", "replies", "log-probabilities"]
    assert {"rewards", "advantages"} <= verdicts(result).keys() - set(equal)
    [note] = [part.note for part in result.parts if part.name == "rewards"]
    assert note.startswith(f"iteration 2, row 0, score/{replayed.__name__}:judge: ")


def test_other_replies_and_other_updates_are_named(published: Published, bundle: Path, tmp_path: Path) -> None:
    found = verdicts(again(published, bundle, tmp_path / "off", generator_off_by=5e-5))
    assert (found["replies"], found["rewards"]) == ("DIFFERENT", "equal")
    result = again(published, bundle, tmp_path / "kl", approx_kl=lambda updates: 0.5)
    [note] = [part.note for part in result.parts if part.name == "loss"]
    # 0.5 a token, two replies of two tokens.
    assert note == "optimizer step 0 of policy, approx_kl_sum: 0.0 in the bundle, 2.0 computed again"
    assert verdicts(result)["gradient"] == "equal"
    after = verdicts(again(published, bundle, tmp_path / "surer", surer_by=2 * SURER))
    assert after["weights after"] == after["weights before"] == after["gradient"] == "DIFFERENT"


def test_replies_are_read_from_the_ledger_without_the_sampler(
    published: Published, bundle: Path, tmp_path: Path
) -> None:
    result = again(published, bundle, tmp_path / "again", "not installed here: vllm", generator_off_by=1.0)
    assert result.is_same
    assert verdicts(result) == dict.fromkeys(PARTS, "equal") | {"replies": "recorded"}
    [part] = [part for part in result.parts if part.name == "replies"]
    assert part.note == "not installed here: vllm"


def test_nothing_is_the_same_before_the_update_was_compared() -> None:
    parts = [ReplayedPart("weights before", "equal"), ReplayedPart("replies", "equal")]
    assert not IterationReplay(2, parts).is_same
    assert IterationReplay(2, [*parts, ReplayedPart("weights after", "equal")]).is_same


def test_a_stage_that_comes_out_different_is_not_packed(published: Published, tmp_path: Path) -> None:
    result = packed(published, tmp_path / "other.tar", 2, surer_by=2 * SURER)
    assert not result.is_same
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.tar-scratch"]


def test_bad_input_is_refused_before_anything_is_computed(published: Published, tmp_path: Path) -> None:
    where = ("--output", published.output)
    for arguments, line in (
        (("ppo", "b.tar", "--iteration", 9), "--iteration: 9 is not allowed: must be one of 0 to 3"),
        (("policy", "b.tar", "--iteration", 0), "it has no ledger; must be a stage of kind 'ppo'"),
        (
            ("ppo", "b.tar", "--iteration", 2, "--sample", 7),
            "--sample: 7 is not allowed: must be a row that iteration 2 learned from, one of 0, 1, 2, 3",
        ),
        (("ppo", tmp_path / "no" / "b.tar", "--iteration", 2), "must be a file in a directory that exists"),
        (("ppo", tmp_path, "--iteration", 2), "must be a file in a directory that exists"),
    ):
        said = xray("bundle", *arguments, *where)
        assert said.exit_code == 2
        assert line in said.output
    assert xray("bundle", "ppo", "b.tar", *where).exit_code == 2
    (tmp_path / "text.tar").write_text("no archive")
    for given, line in (
        ((tmp_path / "text.tar",), "cannot be read"),
        ((tmp_path / "text.tar", "--iteration", 2), "not for a bundle, which has one iteration"),
        (("ppo", *where, "--public-key", "key.pub"), "--public-key: is for a bundle"),
    ):
        said = xray("replay", *given)
        assert said.exit_code == 2
        assert line in said.output


def test_a_bundle_that_an_agent_could_not_sign_is_not_begun(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(published.output / "keys" / "signing.pub"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(ConfigError, match="SSH_AUTH_SOCK is not set: no SSH agent can sign"):
        packed(published, tmp_path / "b.tar", 2)
    assert list(tmp_path.iterdir()) == []


def test_the_log_in_a_bundle_must_publish_the_stage(published: Published, tmp_path: Path) -> None:
    """A list of files that was signed again is not enough."""
    [stage] = published.output.glob("checkpoints/ppo-*")
    sha256, source = file_sha256(stage / MANIFEST), tmp_path / "source"
    publish_log(published.output, {sha256}, source)
    keys = [key.key for key in trusted_keys(published.output)]
    require_published(source, sha256, keys)
    with pytest.raises(ValueError, match=r"^the log does not publish 000000000000$"):
        require_published(source, "0" * 64, keys)
    with pytest.raises(ValueError, match="no trusted key signed it"):
        require_published(source, sha256, [])
    [tile] = (source / "tile" / "entries").rglob("*[0-9]")
    content = bytearray(tile.read_bytes())
    content[-1] ^= 1
    tile.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"^its entries are not those of its signed state$"):
        require_published(source, sha256, keys)
    tile.write_bytes(bytes(content[:-40]))
    with pytest.raises(ValueError, match="is damaged"):
        require_published(source, sha256, keys)


def test_an_export_is_no_bundle_of_an_iteration(published: Published, tmp_path: Path) -> None:
    assert xray("export", "ppo", tmp_path / "all.tar", "--output", published.output).exit_code == 0
    said = xray("replay", tmp_path / "all.tar")
    assert said.exit_code == 2
    assert "there is no iteration.json in it, which `xray bundle` writes" in said.output


def test_an_audit_refuses_a_bundle_of_an_iteration(bundle: Path) -> None:
    said = xray("audit", bundle)
    assert said.exit_code == 2
    assert "it has one iteration; `xray replay" in said.output


def test_a_page_shows_the_path_of_a_reply(bundle: Path) -> None:
    with tarfile.open(bundle) as archive:
        page = archive.extractfile("sample-1.html").read().decode()  # type: ignore[union-attr]
    assert "Row 1 of iteration 2 of ppo" in page
    assert "question number" in page
    assert f"<td>{replayed.__name__}:judge</td>" in page
    # A fake model's gradient always has norm 2: (4 + 4 - 4) / (2 * 2 * 2).
    assert page.count('<td class="num">0.5</td>') >= 2
    assert "<script" not in page


def test_hashed_tokens_have_no_page(inputs: PPOInputs, tmp_path: Path) -> None:
    # What the tokens are salted with.
    (inputs.prompts.path / MANIFEST).write_text("{}")
    hashed = Published(tmp_path / "run", inputs).make(tmp_path / "made", ledger=LedgerConfig(tokens="hashed"))
    said = xray("bundle", "ppo", tmp_path / "b.tar", "--iteration", 1, "--sample", 0, "--output", hashed.output)
    assert said.exit_code == 2
    assert "--sample: not allowed: the ledger has hashed tokens, and no numbers of single ones" in said.output


def test_the_cosine_of_a_part_from_norms() -> None:
    """g₁ = (3, 0), g₂ = (0, 4): |g| = 5, and the cosine of g₁ with (3, 4) is 3/5."""
    assert cosine(3.0, 4.0, 5.0) == pytest.approx(0.6)
    assert cosine(1.0, 3.0, 2.0) == -1.0, "against the rest: 1 - 3 = -2"
    assert cosine(0.0, 5.0, 5.0) is None
