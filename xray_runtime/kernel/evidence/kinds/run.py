"""The entries that every run, and every decision about a model, writes."""

from xray_runtime.kernel.evidence.view import Decision, Left, Published, RunBegan, RunEnded

KINDS = (Decision, Published, RunBegan, RunEnded, Left)
