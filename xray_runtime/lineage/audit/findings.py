"""The findings of an audit: each code with its meaning and remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """One difference from what was recorded."""

    subject: str
    """Checkpoint (stage and digest), or file, or registered model."""
    code: str
    detail: str

    @property
    def is_broken(self) -> bool:
        """False for a note."""
        return self.code not in NOTES

    def to_json(self) -> dict[str, object]:
        meaning, mend = CODES[self.code]
        return asdict(self) | {"broken": self.is_broken, "meaning": meaning, "mend": mend}


_RECOMPUTE = (
    "Restore the directory from a copy (`xray fetch`, where there is a shared store), or move it away and run the "
    "lifecycle again: it computes the same bytes again."
)
_RESTORE = "Restore the database from a copy, or run the lifecycle again to record the checkpoint anew."
_ASK = "Find out who changed it, and why, before using the model."

NOTES: dict[str, tuple[str, str]] = {
    "source-changed": ("The source file has changed since it was read; the data that was read is in the store.", _ASK),
    "code-uncommitted": (
        "It was computed with changes that were not committed; they are in attestation/code.diff.",
        "",
    ),
    "code-unavailable": ("The code's commit is not in this repository.", "Fetch it, or ask who ran it."),
    "evaluation-near-overlap": (
        "The policy was judged on prompts that share long passages with its training data, or an ancestor's.",
        "Inspect them; if they give the answer away, evaluate on other prompts.",
    ),
    "evaluation-unchecked": (
        "It is not known whether the policy was judged on prompts that it was trained on.",
        "Give a dataset of a kind of your own its train.arrow; restore a file that is damaged.",
    ),
    "evaluation-missing": ("The registered policy was never evaluated.", "Run the lifecycle to its end."),
    "run-open": (
        "A run is in progress or was killed: its record is not signed yet.",
        "Run the lifecycle to its end: it signs it.",
    ),
    "file-unknown": ("The file is not one of the records: nothing that is signed covers it.", ""),
    "withdrawn": (
        "The file held data that was withdrawn (`xray withdraw`): it was erased, and a signed entry says so.",
        "",
    ),
    "snapshot-left": (
        "Snapshots that a stage would go on from.",
        "Run the lifecycle to its end, or remove them: the stage then starts over.",
    ),
    "checkpoint-new": (
        "The signed log does not have this checkpoint yet: a run was cut short, or is at work.",
        "Run the lifecycle to its end.",
    ),
    "tracking-unchecked": ("Runs are recorded in another MLflow, which was not asked.", "Name it with --tracking-uri."),
    "mlflow-location-other": (
        "MLflow keeps artifacts of an imported checkpoint elsewhere, as after its directory was moved.",
        "If it was not moved, ask who changed it.",
    ),
    "mlflow-metric-earlier": ("MLflow has points of an attempt that was cut short, beside those of the last.", ""),
    "registry-page-unchecked": (
        "MLflow's page was written by another release with other wording; it was not compared.",
        "Run the lifecycle again: it writes the page anew.",
    ),
}
"""Code → meaning and remedy of what leaves an audit sound."""

CODES: dict[str, tuple[str, str]] = {
    **NOTES,
    "checkpoint-missing": ("A checkpoint that is recorded is not in the store.", _RECOMPUTE),
    "manifest-malformed": ("The list of the checkpoint's files cannot be read.", _RECOMPUTE),
    "manifest-replaced": ("The list of the checkpoint's files differs from the published one.", _RECOMPUTE),
    "manifest-inconsistent": (
        "The manifest's key does not follow from its config, parents, code and versions: it was edited.",
        _RECOMPUTE,
    ),
    "unsafe-path": ("The manifest names a file outside of its checkpoint; it was not opened.", _RECOMPUTE),
    "file-added": ("The checkpoint has a file that was not published with it.", "Remove it if it is harmless."),
    "file-missing": ("A file of the checkpoint is gone.", _RECOMPUTE),
    "file-changed": ("A file's bytes are not those that were published.", _RECOMPUTE),
    "file-link": ("A file of the checkpoint is a link; it was not followed.", _RECOMPUTE),
    "misplaced": (
        "The checkpoint is where another one belongs: directories were swapped or renamed.",
        "Rename it to its stage and the first 12 digits of its key.",
    ),
    "duplicate": ("The same checkpoint is in the store twice.", "Remove the copy whose name is not its own."),
    "parent-missing": ("A parent is not in the store: the chain ends here.", _RECOMPUTE),
    "cycle": ("The checkpoint is its own ancestor, which is impossible.", _ASK),
    "statement-missing": ("The record of how this copy was made is missing.", _RECOMPUTE),
    "statement-malformed": ("The record of how this copy was made cannot be read.", _RECOMPUTE),
    "statement-contradicts": ("The statement and the checkpoint it is about disagree.", _RECOMPUTE),
    "signature-missing": ("The statement is not signed.", _RECOMPUTE),
    "signature-malformed": ("The signature cannot be read.", _RECOMPUTE),
    "signature-foreign": ("The statement was signed with another key than the one trusted here.", _ASK),
    "signature-retired": (
        "The statement was signed with a key that had been retired: a holder of the old key made it.",
        _ASK,
    ),
    "rotation-broken": (
        "The record of a key rotation is incomplete, or not signed by both keys.",
        "Restore keys/retired/ from a copy: until then, signatures of the old key count as foreign.",
    ),
    "signature-invalid": ("The statement or a file beside it was changed after it was signed.", _RECOMPUTE),
    "key-missing": (
        "There is no usable public key to check signatures with.",
        "Name it with --public-key, or put it back at keys/signing.pub.",
    ),
    "card-missing": ("The model card is gone.", _RECOMPUTE),
    "card-changed": ("The model card is neither the one published nor that of a later evaluation.", _RECOMPUTE),
    "heldout-overlap": ("Some held-out prompts of a dataset are also among its training prompts.", _ASK),
    "evaluation-overlap": (
        "The policy was judged on prompts that it, or a model it came from, was trained on.",
        "Do not use the numbers; evaluate again on unseen prompts.",
    ),
    "evaluation-foreign": ("The policy was judged on prompts that are not in the dataset's held-out part.", _ASK),
    "evaluation-inconsistent": ("The evaluation's files contradict each other.", _ASK),
    "record-malformed": ("A record of the run cannot be read.", "Run the lifecycle again: it writes the record anew."),
    "record-differs": (
        "lifecycle.json does not agree with the checkpoints.",
        "Run the lifecycle again: it writes the record anew. Missing checkpoints may be restored with `xray fetch`.",
    ),
    "run-unsigned": (
        "The record or the report of a run is not signed.",
        "Run the lifecycle again: it writes and signs them anew.",
    ),
    "run-changed": (
        "A file that a run left (its record, report, metrics, a table, figure or page) differs from the one it signed.",
        "Run the lifecycle again: it writes the record and the report anew. The rest comes from a copy.",
    ),
    "file-unsigned": ("A file lies among the records that no run left there.", "Remove it, and ask who put it there."),
    "key-exposed": (
        "Others than its owner can, or could, use the key that signs.",
        "Its signatures since then may be somebody else's: change the mode, rotate the key, and ask who had access.",
    ),
    "log-missing": (
        "The signed log of what was published, decided and left here is gone.",
        "Restore log.jsonl from a copy. Where nothing but checkpoints is left, import them into a new directory.",
    ),
    "log-broken": ("The signed log is not whole: from here on it vouches for nothing.", _ASK),
    "log-shorter": ("Entries were taken off the signed log, or an older one was put in its place.", _ASK),
    "checkpoint-unlogged": (
        "The signed log does not say that this checkpoint was published here.",
        "Ask where it came from. The lifecycle that made it, run again, takes it into the log.",
    ),
    "recorded-broken": (
        "Recorded answers and their signed chain disagree: a segment was edited, removed, replayed or put there.",
        f"{_ASK} Do not learn from them: move `recorded` away, or restore it from a copy.",
    ),
    "recorded-shorter": ("Lines were taken off the chain of recorded answers, or an older one put in its place.", _ASK),
    "recorded-readable": (
        "Other users can, or could, read the keys of recorded texts.",
        "Set the mode of `recorded/keys` to 0700, and of the files in it to 0600.",
    ),
    "comparison-broken": (
        "Verdicts of `xray compare` were changed or removed, or an older copy was put in their place.",
        "Restore the newest copy of the session: nothing learns from it until then.",
    ),
    "recorded-foreign": ("Recorded answers name a model that was never in this store.", _ASK),
    "tracking-missing": (
        "MLflow's store, where the runs were recorded, is gone: nothing of it was checked.",
        "Restore mlflow.db from a copy, or run the lifecycle again to record it anew.",
    ),
    "kept-unsealed": (
        "Tokens, states, a snapshot or answers that a stage kept were planted or edited, or are of an older version of "
        "X-ray. Training does not read them.",
        "Ask who changed it; remove it: what is needed is computed again.",
    ),
    "tracking-unreadable": ("MLflow's store cannot be read.", "Restore it, or name another with --tracking-uri."),
    "mlflow-model-missing": ("MLflow does not know this checkpoint.", _RESTORE),
    "mlflow-model-changed": ("MLflow's record of the checkpoint does not agree with the checkpoint.", _RESTORE),
    "mlflow-run-missing": ("The MLflow run that made the checkpoint is gone.", _RESTORE),
    "mlflow-run-deleted": (
        "The MLflow run that made the checkpoint, or its experiment, was deleted.",
        "Restore it: `mlflow runs restore`, `mlflow experiments restore`.",
    ),
    "mlflow-run-changed": ("Name, params or tags of the MLflow run are not what was signed.", _RESTORE),
    "mlflow-row-unexplained": (
        "MLflow has a row that no signed record explains: somebody else wrote it.",
        "Delete it in MLflow, and ask who put it there.",
    ),
    "mlflow-location-changed": ("MLflow looks for artifacts outside of this directory.", _RESTORE),
    "tracking-unknown": (
        "MLflow's database has a table, column, view or trigger that this audit does not know.",
        "If MLflow was upgraded, use the version that X-ray requires; if not, ask who put it there.",
    ),
    "registry-unexplained": (
        "MLflow has a registered model or version that no signed decision explains.",
        "Delete it in MLflow, and ask who put it there.",
    ),
    "mlflow-input-added": ("MLflow shows an input that was not used: it was added later.", _RESTORE),
    "mlflow-input-missing": ("MLflow does not show a parent or dataset that was used.", _RESTORE),
    "mlflow-dataset-changed": ("The dataset MLflow shows is not the one that was used.", _RESTORE),
    "mlflow-metric-changed": ("Numbers in MLflow are not those that were signed.", _RESTORE),
    "registry-changed": (
        "A registered version does not point to the model it names.",
        "Delete the version and run the lifecycle again, which registers the policy anew.",
    ),
    "registry-page-changed": (
        "MLflow's page of a registered model does not agree with the signed records.",
        "Run the lifecycle again, or `xray promote`: both write the page anew. Delete tags that they did not write.",
    ),
    "alias-moved": (
        "An alias does not point where the last signed decision put it.",
        "Set it back, or promote the model with `xray promote`.",
    ),
}
"""Code → meaning and remedy of every finding."""
