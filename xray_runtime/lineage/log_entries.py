"""The entries of the signed log (see `log`): what each kind says, and the head that ends a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.config.serving import CanaryConfig
from xray_runtime.lineage.statement import InTotoRecord
from xray_runtime.store.manifest import Sha256

START = "0" * 64
"""The first entry names this as the line before it."""
Action = Literal["register", "promote", "decline", "rollback", "prune", "rotate"]
MOVES = ("register", "promote", "rollback")
"""Actions after which an alias points somewhere else."""


class SignedEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    previous: Sha256 = START
    """sha256 of the line before; set as the entry is written."""
    at: str = ""


class Decision(SignedEntry):
    """One decision: `alias` of the registered model `name` now points to `version`, which is `checkpoint`.

    After `decline` it does not: a person refused. Two actions concern no model: `prune` removed `checkpoint` from the
    store; `rotate` names the sha256 of the public key that signs from here on.
    """

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


class Published(SignedEntry):
    """A checkpoint is in the store: computed here, or copied from elsewhere (`bring`)."""

    action: Literal["publish", "bring"]
    directory: str
    """Its name below checkpoints/."""
    checkpoint: Sha256


class RunBegan(SignedEntry):
    """A run started in this directory, or resumed."""

    action: Literal["begin"] = "begin"
    run_id: str
    place: str
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


class RunEnded(SignedEntry):
    """A run ended and wrote files for people."""

    action: Literal["end"] = "end"
    run_id: str
    status: str


class Left(SignedEntry):
    """Another command wrote files for people."""

    action: Literal["files"] = "files"
    note: str


class Recorded(SignedEntry):
    """The end of the chain of recorded answers, as it was then; see `recorded`."""

    action: Literal["record"] = "record"
    entries: int
    head: Sha256


class Withdrawn(SignedEntry):
    """A person's data, or a source, was withdrawn: what holds it, what was made from it, and what was erased."""

    action: Literal["withdraw"] = "withdraw"
    subject: str
    """`user PSEUDONYM`, or `source KIND:DIGEST`."""
    by: str
    holders: list[Sha256]
    """Checkpoints that hold it."""
    descendants: list[Sha256]
    """Checkpoints that were made from them."""
    erased: list[str]
    """Paths below the output directory of the files that are gone since."""


class NightWritten(SignedEntry):
    """The record of a night of the nightly flow, as it is from here on; the line's subject is its file."""

    action: Literal["night"] = "night"
    number: int
    night: dict[str, Any]


class FilesSigned(SignedEntry):
    """The signed files of a directory were changed this often; see `signed_files`."""

    action: Literal["sign"] = "sign"
    directory: str
    """Below the output directory."""
    changes: int
    statement: Sha256


class CanaryBegan(SignedEntry):
    """From here on a candidate answers a share of the requests, beside the champion."""

    action: Literal["canary"] = "canary"
    name: str
    """The registered model whose champion it is beside."""
    candidate: Sha256
    champion: Sha256
    first: int
    """Only recorded segments from this number on count."""
    rules: CanaryConfig
    by: str


class ArmResult(BaseModel):
    """The measurements of one of the two models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int
    judges: int
    """People whose feedback counts: one value each."""
    feedback: float | None
    """Mean of these values, from 0 to 1."""
    feedback_low: float
    feedback_high: float
    users: int
    """People who were answered."""
    errors: float | None
    """Share of them whose first answer failed or broke off."""
    errors_low: float
    errors_high: float
    latency_s: float | None
    """Median seconds to the end of an answer; it decides nothing."""


Outcome = Literal["passed", "rolled back", "undecided"]


class CanaryEnded(SignedEntry):
    """A canary ended: the champion answers everything."""

    action: Literal["canary-end"] = "canary-end"
    canary: Sha256
    """The line of its beginning."""
    outcome: Outcome
    reason: str
    through: int
    """The last recorded segment that was read."""
    arms: dict[Literal["candidate", "champion"], ArmResult]


Entry = (
    Decision
    | Published
    | RunBegan
    | RunEnded
    | Left
    | Recorded
    | Withdrawn
    | NightWritten
    | FilesSigned
    | CanaryBegan
    | CanaryEnded
)


class Record(InTotoRecord[Annotated[Entry, Field(discriminator="action")]]):
    predicate_type: Literal["urn:xray:log:v1"] = Field("urn:xray:log:v1", alias="predicateType")


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
    text: bytes
    entry: Any
    files: dict[str, str] = field(repr=False)
    """Path below the output directory → sha256."""
