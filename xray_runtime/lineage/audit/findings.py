"""What an audit can find: each code, what it means and how to mend it."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is not as it was recorded."""

    subject: str
    """Checkpoint (stage and digest), or file, or registered model."""
    code: str
    detail: str

    @property
    def is_broken(self) -> bool:
        """False for what is only worth knowing."""
        return self.code not in NOTES

    def to_json(self) -> dict[str, object]:
        meaning, mend = CODES[self.code]
        return asdict(self) | {"broken": self.is_broken, "meaning": meaning, "mend": mend}


_RECOMPUTE = (
    "Restore the directory from a copy (`xray fetch`, where there is a shared store), or move it away and run the "
    "lifecycle again: it computes the same bytes again."
)
_RESTORE = "Restore the database from a copy, or run the lifecycle again to record the checkpoint anew."
_ASK = "Ask who changed it, and why, before the model is used."

CODES: dict[str, tuple[str, str]] = {
    "checkpoint-missing": ("A checkpoint that is recorded is not in the store.", _RECOMPUTE),
    "manifest-malformed": ("The list of the checkpoint's files cannot be read.", _RECOMPUTE),
    "manifest-replaced": ("The list of the checkpoint's files is another one than was published.", _RECOMPUTE),
    "manifest-inconsistent": (
        "The manifest's key does not follow from its config, parents, code and versions: it was edited.",
        _RECOMPUTE,
    ),
    "unsafe-path": ("The manifest names a file outside of its checkpoint; it was not opened.", _RECOMPUTE),
    "file-added": ("A file lies in the checkpoint that was not published with it.", "Remove it if it is harmless."),
    "file-missing": ("A file of the checkpoint is gone.", _RECOMPUTE),
    "file-changed": ("A file's bytes are not those that were published.", _RECOMPUTE),
    "file-link": ("A file of the checkpoint is a link; it was not followed.", _RECOMPUTE),
    "misplaced": (
        "The checkpoint lies where another one belongs: directories were swapped or renamed.",
        "Rename it to its stage and the first 12 digits of its key.",
    ),
    "duplicate": ("The same checkpoint lies in the store twice.", "Remove the copy whose name is not its own."),
    "parent-missing": ("What this was made from is not in the store: the chain ends here.", _RECOMPUTE),
    "cycle": ("The checkpoint is its own ancestor, which no real computation can give.", _ASK),
    "statement-missing": ("Nothing says how this copy was made.", _RECOMPUTE),
    "statement-malformed": ("What says how this copy was made cannot be read.", _RECOMPUTE),
    "statement-contradicts": ("The statement and the checkpoint it is about disagree.", _RECOMPUTE),
    "signature-missing": ("Nobody vouches for the statement.", _RECOMPUTE),
    "signature-malformed": ("The signature cannot be read.", _RECOMPUTE),
    "signature-foreign": ("The statement was signed with another key than the one trusted here.", _ASK),
    "signature-retired": (
        "The statement says it was made after the key it is signed with was retired: who has the old key made it.",
        _ASK,
    ),
    "rotation-broken": (
        "What says how one signing key took over from another is not signed by both, or not whole.",
        "Restore keys/retired/ from a copy: until then what the old key signed counts as foreign.",
    ),
    "signature-invalid": ("The statement, or what lies beside it, was changed after it was signed.", _RECOMPUTE),
    "key-missing": (
        "There is no public key to check signatures with.",
        "Name it with --public-key, or put it back at keys/signing.pub.",
    ),
    "card-missing": ("The model card is gone.", _RECOMPUTE),
    "card-changed": ("The model card is neither the one published nor that of a later evaluation.", _RECOMPUTE),
    "source-changed": ("The file this was read from has other bytes today; what was read is kept in the store.", _ASK),
    "code-uncommitted": (
        "It was computed with changes that were not committed; they are in attestation/code.diff.",
        "",
    ),
    "code-unavailable": ("The code's commit is not in this repository.", "Fetch it, or ask who ran it."),
    "heldout-overlap": ("Held-out prompts of a dataset also stand among its training prompts.", _ASK),
    "evaluation-overlap": (
        "The policy was judged on prompts that it, or a model it came from, was trained on.",
        "Do not use the numbers; evaluate again on prompts nobody has seen.",
    ),
    "evaluation-near-overlap": (
        "The policy was judged on prompts of which parts stand in what it, or a model it came from, was trained on.",
        "Look at them; where they give the answer away, evaluate on other prompts.",
    ),
    "evaluation-unchecked": (
        "Whether the policy was judged on prompts that it was trained on is not known.",
        "Give a dataset of a kind of your own its train.arrow; restore a file that is damaged.",
    ),
    "evaluation-foreign": ("The policy was judged on prompts that are not in the dataset's held-out part.", _ASK),
    "evaluation-inconsistent": ("The evaluation's files contradict each other.", _ASK),
    "evaluation-missing": ("The registered policy was never evaluated.", "Run the lifecycle to its end."),
    "record-malformed": ("A record of the run cannot be read.", "Run the lifecycle again: it writes the record anew."),
    "record-differs": (
        "lifecycle.json says other things than the checkpoints.",
        "Run the lifecycle again: it writes the record anew. What is missing alone, `xray fetch` may bring back.",
    ),
    "run-unsigned": (
        "Nobody vouches for the record, the report and the figures of a run that ended.",
        "Run the lifecycle again: it writes and signs them anew.",
    ),
    "run-open": (
        "A run is at work, or was killed: its record and its report are not signed yet.",
        "Run the lifecycle to its end: it signs them.",
    ),
    "run-changed": (
        "A run's record, report, metrics or figure is not what was signed when the run ended.",
        "Run the lifecycle again: it writes the record and the report anew. Metrics and figures come from a copy.",
    ),
    "kept-unsealed": (
        "Tokens, states, a snapshot or answers that a stage kept were planted or edited, or are of an older version of "
        "X-ray. Training does not read them.",
        "Ask who changed it; remove it: what is needed is computed again.",
    ),
    "decision-broken": ("The signed chain of registrations and promotions is broken.", _ASK),
    "tracking-unreadable": ("MLflow's store cannot be read.", "Restore it, or name another with --tracking-uri."),
    "mlflow-model-missing": ("MLflow does not know this checkpoint.", _RESTORE),
    "mlflow-model-changed": ("What MLflow says about the checkpoint is not what the checkpoint says.", _RESTORE),
    "mlflow-run-missing": ("The MLflow run that made the checkpoint is gone.", _RESTORE),
    "mlflow-run-deleted": (
        "The MLflow run that made the checkpoint was deleted.",
        "Restore it: `mlflow runs restore`.",
    ),
    "mlflow-run-changed": ("Params or tags of the MLflow run are not what the statement says.", _RESTORE),
    "mlflow-input-added": ("MLflow shows an input that was not used: it was added later.", _RESTORE),
    "mlflow-input-missing": ("MLflow does not show a parent or dataset that was used.", _RESTORE),
    "mlflow-dataset-changed": ("The dataset MLflow shows is not the one that was used.", _RESTORE),
    "mlflow-metric-changed": ("Numbers in MLflow are not those of the evaluation.", _RESTORE),
    "registry-changed": (
        "A registered version points to another model than it says.",
        "Delete the version and run the lifecycle again, which registers the policy anew.",
    ),
    "alias-moved": (
        "An alias does not point where the last signed decision put it.",
        "Set it back, or promote the model the proper way.",
    ),
}

NOTES = {
    "code-uncommitted",
    "code-unavailable",
    "source-changed",
    "evaluation-missing",
    "evaluation-near-overlap",
    "evaluation-unchecked",
    "run-open",
}
"""Worth knowing; the audit is sound nevertheless."""
