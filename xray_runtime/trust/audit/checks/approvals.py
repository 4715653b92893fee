"""People's approvals in the log: each is signed, for this log, by the key that it names."""

from __future__ import annotations

from collections.abc import Iterator

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.kinds.approval import LogApprovals
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.history.audit_check import ASK, AuditCheck, Audited, Finding, Meaning
from xray_runtime.trust.approvals import verified

CODES = {"approval-invalid": Meaning("An approval in the log is not one that the person's key signed for it.", ASK)}


def _check(audited: Audited) -> Iterator[Finding]:
    for given in audited.log.state(LogApprovals).given:
        try:
            verified(given, audited.log)
        except ValueError as error:
            detail = f"of {given.name} {given.checkpoint[:12]}: {first_line(error)}"
            yield Finding(LOG, "approval-invalid", detail)


CHECK = AuditCheck("people's approvals", CODES, _check)
