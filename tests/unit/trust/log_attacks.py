"""Attacks on the whole of an output directory, and what an audit finds of each: alone, and with a witness.

python -m tests.unit.trust.log_attacks     prints the table of docs/witness.md
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from securesystemslib.signer import SSlibKey

from tests.unit.trust.long_logs import read_lines
from tests.unit.trust.synthetic import NAME, Lifecycle, copied
from tests.unit.trust.tampering import (
    ALIAS_BY_HAND,
    an_entry_by_a_retired_key_that_claims_an_earlier_time,
    lines,
    place,
    restated,
    sql,
    write_lines,
)
from xray_runtime.kernel.evidence.envelope import new_private_key
from xray_runtime.kernel.evidence.kinds.approval import LogApprovals
from xray_runtime.kernel.evidence.log import COSIGNED, END, LOG, view
from xray_runtime.kernel.evidence.view import Left
from xray_runtime.kernel.history.reference import open_lineage_store
from xray_runtime.trust import log
from xray_runtime.trust.approvals import approve
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.log import append, choose_witness, decide
from xray_runtime.trust.merkle import MerkleTree
from xray_runtime.trust.model_signature import sign_model
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.signing import read_public, signing_key
from xray_runtime.trust.witness import DirectoryWitness, read_log_checkpoint


class Scene(NamedTuple):
    """A directory after the newest of its records, and what an attacker kept of it from before."""

    output: Path
    yesterday: Path
    """A copy of the directory, before its newest records."""
    witness: Path


class Attack(NamedTuple):
    name: str
    change: Callable[[Scene], object]
    alone: str
    """Code of the finding without a witness; empty: nothing is found."""
    witnessed: str
    tracked: bool = False
    """Whether it is one on MLflow."""


def removed(output: Path, count: int) -> None:
    """Take the newest records off, with what they were about, and the end that is signed with each."""
    write_lines(output, lines(output)[:-count])
    (output / END).unlink()


def newest_removed(scene: Scene) -> None:
    write_lines(scene.output, lines(scene.output)[:-1])
    shutil.copy(scene.yesterday / END, scene.output / END)


def tail_removed(scene: Scene) -> None:
    removed(scene.output, 2)


def older_log(scene: Scene) -> None:
    for name in (LOG, END):
        shutil.copy(scene.yesterday / name, scene.output / name)


def rolled_back(scene: Scene) -> None:
    shutil.rmtree(scene.output)
    scene.yesterday.rename(scene.output)


def rolled_back_with_witness(scene: Scene) -> None:
    """The witness lies where the attacker writes, and he has an old copy of it too."""
    rolled_back(scene)
    for path in sorted(scene.witness.glob("*.checkpoint")):
        shutil.copy(scene.output / COSIGNED, path)


def rewritten(scene: Scene) -> None:
    """The owner of the key signs another end."""
    rolled_back(scene)
    log._RETRY_AT[scene.output] = math.inf
    decide(scene.output, action="register", name="x", alias="candidate", version="9", checkpoint="ab" * 32)


def new_log(scene: Scene) -> None:
    """The owner of the key writes a log that says all the rest, and begins otherwise."""
    known = list(read_lines(scene.output))
    (scene.output / LOG).unlink()
    log._RETRY_AT[scene.output] = math.inf
    for line in known[:-1]:
        append(scene.output, line.entry, line.files)


def back_dated(scene: Scene) -> None:
    an_entry_by_a_retired_key_that_claims_an_earlier_time(scene.output)


def key_swapped(scene: Scene) -> None:
    shutil.rmtree(scene.output / "keys")
    signing_key(scene.output)


def witness_swapped(scene: Scene) -> None:
    rolled_back(scene)
    shutil.rmtree(scene.witness, ignore_errors=True)
    scene.witness.mkdir()


def witness_gone(scene: Scene) -> None:
    rolled_back(scene)
    shutil.rmtree(scene.witness, ignore_errors=True)


def statement_transplanted(scene: Scene) -> None:
    """Another run computed the same evaluation, without gates, and the same key signed that."""
    restated(
        place(scene.output, "evaluate-*"),
        lambda content: content["predicate"]["runDetails"]["metadata"].update(finishedOn="2026-01-01T00:00:00+00:00"),
        signing_key(scene.output).read_bytes(),
    )


def fewer_files(scene: Scene) -> None:
    """The owner of the key signs a model without its weights, and changes these."""
    model = place(scene.output, "ppo-2-*")
    weights = model / "model.safetensors"
    names = json.loads((model / "manifest.json").read_text())["files"]
    files = {entry["path"]: entry["sha256"] for entry in names if entry["path"] != weights.name}
    (model / "model.sig").unlink()
    sign_model(model, files, signing_key(scene.output))


def approval_of_another(scene: Scene) -> None:
    """The key's owner logs what a person signed in another directory about a model of the same name and bytes."""
    other, person = scene.output.with_name("other"), scene.output.with_name("person.pem")
    register(other, "one")
    person.write_bytes(new_private_key())
    approve(other, name=NAME, checkpoint="ab" * 32, key=person, by="Ada", note="read it")
    [given] = view(other).state(LogApprovals).given
    append(scene.output, given)


def mlflow_edited(scene: Scene) -> None:
    sql(scene.output, ALIAS_BY_HAND)


SHORTER, SILENT, CONTRADICTS = "log-shorter", "witness-silent", "statement-contradicts"
ATTACKS = (
    Attack("the newest record removed, with an older end", newest_removed, "", SHORTER),
    Attack("a tail of the log removed, and its end", tail_removed, SHORTER, SHORTER),
    Attack("the log replaced by an older valid one", older_log, "", SHORTER),
    Attack("the whole directory set back to yesterday", rolled_back, "", SHORTER),
    Attack("… and the key's owner wrote another end", rewritten, "", SHORTER),
    Attack("the key's owner wrote the whole log anew", new_log, "", SILENT),
    Attack("a stolen retired key signs a back-dated entry", back_dated, "log-broken", "log-broken"),
    Attack("the key swapped", key_swapped, "log-broken", "log-broken"),
    Attack("set back, and an empty witness in place of the witness", witness_swapped, "", SILENT),
    Attack("set back, and the witness gone", witness_gone, "", SILENT),
    Attack("set back, and the witness with it", rolled_back_with_witness, "", ""),
    Attack("an alias in MLflow moved by hand", mlflow_edited, "alias-moved", "alias-moved", True),
    Attack(
        "the statement of another run transplanted",
        statement_transplanted,
        "statement-contradicts",
        "statement-contradicts",
    ),
    Attack("an approval of another directory logged here", approval_of_another, "approval-invalid", "approval-invalid"),
    Attack("a model signature over fewer files", fewer_files, "signature-invalid", "signature-invalid"),
)


def scene(source: Path, directory: Path, *, witnessed: bool) -> Scene:
    """A copy of a lifecycle, perhaps with a witness, three records later."""
    output, witness = copied(source, directory / "run"), directory / "witness"
    if witnessed:
        choose_witness(output, str(witness), None, by="Ada")
    append(output, Left(note="before"))
    yesterday = Path(shutil.copytree(output, directory / "yesterday"))
    for note in ("later", "newest"):
        append(output, Left(note=note))
    return Scene(output, yesterday, witness)


def found(output: Path, **options: str) -> set[str]:
    """Codes of what an audit finds."""
    return {
        finding.code for finding in audit(open_lineage_store(output, None), **options).findings if finding.is_broken
    }


def found_of(attack: Attack, source: Path, directory: Path) -> tuple[set[str], set[str]]:
    """Codes of what is found without a witness, and with one whose directory and key the auditor knows."""
    alone = scene(source, directory / "alone", witnessed=False)
    attack.change(alone)
    witnessed = scene(source, directory / "witnessed", witnessed=True)
    key = str(DirectoryWitness(witnessed.witness).key())
    attack.change(witnessed)
    return found(alone.output), found(witnessed.output, witness=str(witnessed.witness), witness_key=key)


def register(output: Path, *notes: str) -> LogCheckpoint:
    for note in notes:
        append(output, Left(note=note))
    return read_log_checkpoint(output)


def tree_of(output: Path) -> MerkleTree:
    tree = MerkleTree()
    tree.follow(view(output).heads)
    return tree


def keys_of(output: Path) -> list[Path]:
    return [output / "keys" / "signing.pub"]


def view_key(output: Path) -> SSlibKey:
    return read_public(keys_of(output)[0]).key


def table(sources: dict[bool, Path], directory: Path) -> str:
    """The table; `sources`: a lifecycle without MLflow, and one with it."""
    rows = ["| attack | audit without a witness | with one |", "|---|---|---|"]
    for number, attack in enumerate(ATTACKS):
        results = found_of(attack, sources[attack.tracked], directory / str(number))
        shown = (", ".join(f"`{code}`" for code in sorted(codes)) or "sound" for codes in results)
        rows.append(f"| {attack.name} | {' | '.join(shown)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        made = {
            tracked: Lifecycle(Path(temporary) / str(tracked), tracking=tracked).whole() for tracked in (False, True)
        }
        print(table({tracked: one.output for tracked, one in made.items()}, Path(temporary) / "attacks"))
