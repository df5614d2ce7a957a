"""Why a connection over TLS was not made, in words: gRPC's own texts, with whose certificate it was and what to do.

gRPC says it of our refusals; of the other side's it tells only that the socket was closed, since in TLS 1.3 a server looks at
our certificate after our handshake is over; or reset, if we had sent more by then. Texts of grpcio 1.85; others are passed on.
"""

from __future__ import annotations

_CAUSES = (
    (
        "Hostname Verification Check failed",
        "its certificate is not for the name that was dialled: dial a name in it, or set tls_server_name to one",
    ),
    (
        "certificate has expired",
        "its certificate has expired: renew it there",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate was refused here: it must be signed by a CA in our tls_ca, for a TLS server, and valid now",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "it speaks plaintext and we speak TLS: give it tls_cert, tls_key and tls_ca, or leave ours away",
    ),
    *(
        (
            sign,
            "it closed the connection: it wants a certificate that it accepts (ours may be missing, expired, or signed by no "
            "CA in its tls_ca), or it listens for something else",
        )
        for sign in ("Socket closed", "Connection reset", "Broken pipe", "Handshake write failed", "Handshake read failed")
    ),
)
"""What gRPC's text holds, and what it means; the first that fits."""


def in_words(details: str, *, target: str) -> str:
    """details: of the error of a call whose connection failed."""
    meaning = cause(details)
    return f"{target}: {meaning or f'not connected: {_reason(details)}; is the server running, and is the address right?'}"


def cause(details: str) -> str:
    """What was the matter with TLS, if it was that; else empty."""
    for sign, meaning in _CAUSES:
        if sign in details:
            return f"{meaning} ({_reason(details)})"
    return ""


def _reason(details: str) -> str:
    """Without what only gRPC's authors need: codes, addresses, names of its functions, and a verdict on no certificate."""
    parts = [part.strip() for part in details.rpartition("last error: ")[2].split(": ")]
    dropped = ("UNKNOWN", "UNAVAILABLE", "ipv4", "ipv6", "Invalid certificate verification context", "OK")
    kept = [part for part in parts if part and not part.startswith(dropped)]
    return ": ".join(kept[-2:]) or "no reason given"
