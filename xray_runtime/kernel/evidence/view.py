"""The entries of a signed log, and the state that they describe.

An entry folds itself into the state, so a new kind of entry is one class in a module of `evidence.kinds`, or of another
package (entry point `xray.log_entries`). The kinds here are those that every run writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.kernel.store.manifest import Sha256

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope

START = "0" * 64
"""The first entry names this as the line before it."""
LOCKS = "locks"
Action = Literal["register", "promote", "decline", "rollback", "prune", "rotate"]
MOVES = ("register", "promote", "rollback")
"""Actions after which an alias points somewhere else."""
FoldsInto = Literal["fields", "states"] | None
T = TypeVar("T")


class SignedEntry(BaseModel):
    """An entry; a kind of entry names itself with the literals of its field `action`."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    names_files: ClassVar[bool] = True
    """Whether the subjects of its line are files below the output directory."""
    folds_into: ClassVar[FoldsInto] = None
    """Whether `fold` changes fields of `LogView`, or `states` too, for which it reads nothing of the view but heads and
    decisions. None, not known: the state of a log with such an entry is not kept (`kept_state`)."""
    previous: Sha256 = START
    """sha256 of the line before; set as the entry is written."""
    at: str = ""

    def fold(self, view: LogView, line: Line) -> None:
        """Change the state as this entry says; `line`: the one it is in."""


class Head(NamedTuple):
    """The end of a log: its number of entries, and the digest of the last."""

    entries: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.entries}:{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        entries, _, sha256 = text.partition(":")
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise ValueError(f"{text!r} is not allowed: must be ENTRIES:SHA256, as `xray audit --all` prints it")
        return cls(int(entries), sha256)


EMPTY = Head(0, START)


@dataclass(frozen=True)
class Line:
    """One line of the log; its signature has not been checked."""

    number: int
    sha256: str
    envelope: Envelope
    entry: Any
    files: dict[str, str] = field(repr=False)
    """Path below the output directory → sha256."""


class Decision(SignedEntry):
    """One decision: `alias` of the registered model `name` now points to `version`, which is `checkpoint`.

    After `decline` it does not: a person refused. Two actions concern no model: `prune` removed `checkpoint` from the
    store; `rotate` names the sha256 of the public key that signs from here on.
    """

    names_files: ClassVar[bool] = False
    folds_into: ClassVar[FoldsInto] = "fields"
    action: Action
    name: str = ""
    alias: str = ""
    version: str = ""
    checkpoint: Sha256
    by: str
    note: str = ""
    gates: list[dict[str, Any]] = Field(default_factory=list)
    """Each gate with its result and numbers."""
    gates_from: str = ""
    """Source of the gates' bounds."""
    page: int = 0
    """The form of `model_page` that MLflow shows of a registration; 0: none."""
    evidence: dict[str, Sha256] = Field(default_factory=dict)
    """`evaluation`, `comparison` → the checkpoints the numbers were read from; `statement` → the policy's own."""

    def fold(self, view: LogView, line: Line) -> None:
        view.decisions.append(self)
        if self.action == "prune":
            view.pruned.add(self.checkpoint)
            for name in [name for name, entry in view.published.items() if entry.checkpoint == self.checkpoint]:
                del view.published[name]


class Published(SignedEntry):
    """A checkpoint is in the store: computed here, or copied from elsewhere (`bring`)."""

    folds_into: ClassVar[FoldsInto] = "fields"
    action: Literal["publish", "bring"]
    directory: str
    """Its name below checkpoints/."""
    checkpoint: Sha256
    statement: Sha256 | None = None
    """sha256 of its signed statement: runs that compute the same checkpoint make one each, perhaps with one key."""

    def fold(self, view: LogView, line: Line) -> None:
        view.published[self.directory] = self
        view.known[self.checkpoint] = self.directory
        view.pruned.discard(self.checkpoint)


class RunBegan(SignedEntry):
    """A run started in this directory, or resumed."""

    folds_into: ClassVar[FoldsInto] = "fields"
    action: Literal["begin"] = "begin"
    run_id: str
    run_directory: str
    """Directory of its lifecycle.json and report, below the output directory."""
    facts: dict[str, Any]
    """The content of its lifecycle.json until it ends."""
    tracking: str
    """MLflow's address; empty where its store is the output directory's own."""
    experiment: str
    name: str
    """The run's name in MLflow."""
    params: Sha256
    """Digest of the run's params in MLflow."""
    tags: dict[str, str]
    """The run's tags in MLflow that X-ray writes."""

    def fold(self, view: LogView, line: Line) -> None:
        view.ended.pop(self.run_id, None)
        # Runs are in the order in which they started or resumed.
        view.runs.pop(self.run_id, None)
        view.runs[self.run_id] = self


class RunEnded(SignedEntry):
    """A run ended and wrote files for people."""

    folds_into: ClassVar[FoldsInto] = "fields"
    action: Literal["end"] = "end"
    run_id: str
    status: str

    def fold(self, view: LogView, line: Line) -> None:
        view.ended[self.run_id] = self


class Left(SignedEntry):
    """Another command wrote files for people."""

    folds_into: ClassVar[FoldsInto] = "fields"
    action: Literal["files"] = "files"
    note: str


@dataclass
class ChainState:
    """The lines of a signed file so far."""

    heads: list[str] = field(default_factory=list)
    """Digest of each line."""

    @property
    def head(self) -> Head:
        return Head(len(self.heads), self.heads[-1]) if self.heads else EMPTY

    def lacks(self, head: Head) -> str | None:
        """Why a file that once ended in `head` cannot have become this one; None where it can."""
        if head.entries == 0 or (0 < head.entries <= len(self.heads) and self.heads[head.entries - 1] == head.sha256):
            return None
        if head.entries > len(self.heads):
            return f"it has {len(self.heads)} entries and had {head.entries}"
        return f"its entry {head.entries} was replaced"


@dataclass
class LogView(ChainState):
    """The state that the entries of a log describe; later entries replace earlier ones."""

    published: MutableMapping[str, Published] = field(default_factory=dict)
    """Checkpoints that must be in the store, by directory."""
    files: MutableMapping[str, str] = field(default_factory=dict)
    """Path below the output directory → sha256 it must have."""
    runs: MutableMapping[str, RunBegan] = field(default_factory=dict)
    """By id, in the order in which they started or resumed."""
    ended: MutableMapping[str, RunEnded] = field(default_factory=dict)
    """Runs that ended and were not resumed."""
    decisions: list[Decision] = field(default_factory=list)
    pruned: set[str] = field(default_factory=set)
    known: MutableMapping[str, str] = field(default_factory=dict)
    """Every checkpoint that was ever published or brought here → its directory then."""
    erased: set[str] = field(default_factory=set)
    """Paths below the output directory of files that a withdrawal erased, and nothing wrote since."""
    states: dict[type[object], object] = field(default_factory=dict)
    """The state that further kinds of entry describe, by its class."""

    def state(self, kind: type[T]) -> T:
        """The state of a class that entries fold themselves into; empty before the first of them."""
        state_of_kind = self.states.setdefault(kind, kind())
        assert isinstance(state_of_kind, kind)
        return state_of_kind

    def copy(self) -> Self:
        """A view that changes without changing this one."""
        new = {one.name: copy(getattr(self, one.name)) for one in fields(self)}
        # Another thread may ask this view for a state meanwhile.
        new["states"] = {kind: copy(state) for kind, state in dict(self.states).items()}
        return type(self)(**new)

    @property
    def identity(self) -> str:
        """Equal for copies of one log, different for different logs."""
        return self.heads[0][:16] if self.heads else ""

    @property
    def mark(self) -> str:
        """Identity and head, for MLflow to keep: an audit then notices a log that was cut short."""
        return f"{self.identity}:{self.head}" if self.heads else ""

    @property
    def decided(self) -> dict[tuple[str, str], Decision]:
        """(registered model, alias) → the last decision about it. An alias that points elsewhere was moved by hand:
        MLflow lets anybody do that without a trace."""
        return {(decision.name, decision.alias): decision for decision in self.decisions if decision.action in MOVES}

    @property
    def decisions_by_version(self) -> dict[tuple[str, str], list[Decision]]:
        """(registered model, version) → the decisions about it, in order."""
        decisions = defaultdict[tuple[str, str], list[Decision]](list)
        for decision in self.decisions:
            decisions[decision.name, decision.version].append(decision)
        return decisions

    def contradicts(self, mark: str) -> str | None:
        """As `lacks`, for a `mark`; the mark of another log says nothing about this one."""
        identity, _, text = mark.partition(":")
        try:
            return self.lacks(Head.parse(text)) if identity == self.identity else None
        except ValueError:
            return "it is no mark of a log"

    def open_runs(self, output: Path) -> set[str]:
        """Runs at work, and those that were cut short and not followed by another in their place."""
        last = {run.run_directory: run_id for run_id, run in self.runs.items()}
        run_ids = {run_id for run_id in last.values() if run_id not in self.ended}
        return run_ids | {run_id for run_id in self.runs.keys() - self.ended.keys() if is_at_work(output, run_id)}

    def add(self, line: Line) -> None:
        self.heads.append(line.sha256)
        if line.entry.names_files:
            self.files.update(line.files)
            self.erased -= line.files.keys()
        line.entry.fold(self, line)


def is_at_work(output: Path, run_id: str) -> bool:
    try:
        if (output / LOCKS / f"run-{run_id}.lock").is_file():
            run_lock(output, run_id).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    except OSError:
        pass
    return False


def lock(output: Path, name: str) -> FileLock:
    """A lock of an output directory; `log` is held while writing to the log."""
    (output / LOCKS).mkdir(parents=True, exist_ok=True)
    return FileLock(output / LOCKS / f"{name}.lock")


def run_lock(output: Path, run_id: str) -> FileLock:
    """The lock that a run holds while it works in `output`."""
    return lock(output, f"run-{run_id}")
