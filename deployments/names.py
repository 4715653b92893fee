"""Names and messages of what X-ray installs on a Prefect server, which its commands read there."""

from __future__ import annotations

POOL = "xray"
QUEUE = "ray"
"""The work queue of long computations, one at a time. Short flows run in the pool's default queue."""
SUSPENDED = "Suspended by X-ray:"
"""Start of the message of a run that X-ray resumes by itself, unlike one that waits for a person."""
NO_HEARTBEAT = "No heartbeat: its process is gone."
"""Message of the state of a run that Prefect detected as lost."""
