"""Timestamps of the log's checkpoints by an authority: RFC 3161.

A witness says that the log was not shortened, an authority when it was what it is: a key's owner cannot date a decision
back. An authority proves only to those who trust its root certificate; a local one proves nothing to strangers.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import TYPE_CHECKING

from xray_runtime.kernel.errors import first_line
from xray_runtime.trust.note import LogCheckpoint

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from rfc3161_client import TimeStampResponse

TIMEOUT_S = 5.0
QUERY = {"Content-Type": "application/timestamp-query"}


class TimestampProblem(ValueError):
    """An authority does not stamp a checkpoint, or what it answered does not count."""


def request_stamp(address: str, certificate: str, checkpoint: LogCheckpoint) -> str:
    """The token of an authority for a checkpoint, in base64, verified.

    Args:
        certificate: the authority's root certificate, in PEM.

    Raises TimestampProblem.
    """
    import httpx
    from rfc3161_client import HashAlgorithm, TimestampRequestBuilder

    from xray_runtime.kernel.bounded_http import PLAIN, certificates, read

    # Checked before anything is sent.
    roots = _roots(certificate)
    builder = TimestampRequestBuilder().data(checkpoint.body).hash_algorithm(HashAlgorithm.SHA256)
    request = builder.nonce(nonce=True).build()
    try:
        with (
            httpx.Client(verify=certificates(), timeout=TIMEOUT_S) as client,
            client.stream("POST", address, content=request.as_bytes(), headers=QUERY | PLAIN) as response,
        ):
            status, content = response.status_code, read(response, TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TimestampProblem(f"{address} does not answer ({type(error).__name__})") from None
    if status != 200:
        raise TimestampProblem(f"{address} answers {status}")
    _verify(_decoded(content), roots, checkpoint.body, request.nonce)
    return base64.b64encode(content).decode()


def stamped_at(token: str, certificate: str, checkpoint: LogCheckpoint) -> datetime:
    """When an authority stamped a checkpoint. Raises TimestampProblem: the token is not its, or of another one."""
    try:
        response = _decoded(base64.b64decode(token, validate=True))
    except ValueError as error:
        raise TimestampProblem(first_line(error)) from None
    _verify(response, _roots(certificate), checkpoint.body)
    return response.tst_info.gen_time


def _decoded(content: bytes) -> TimeStampResponse:
    from rfc3161_client import decode_timestamp_response

    try:
        return decode_timestamp_response(content)
    except ValueError:
        raise TimestampProblem("it is no timestamp") from None


def _verify(response: TimeStampResponse, roots: list[Certificate], body: bytes, nonce: int | None = None) -> None:
    from rfc3161_client import VerificationError, VerifierBuilder

    try:
        VerifierBuilder(roots=roots, nonce=nonce).build().verify_message(response, body)
    except (VerificationError, ValueError) as error:
        raise TimestampProblem(f"the timestamp does not count ({first_line(error)})") from None


def _roots(certificate: str) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(certificate.encode())
    except ValueError:
        raise TimestampProblem("it has no certificate in PEM") from None
