"""What gRPC says of a connection that failed, in words for people."""

from __future__ import annotations

import pytest

from kvdir.rpc.refusal import cause, in_words

FAILED = "failed to connect to all addresses; last error: "
VERIFY = "SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED"


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("UNKNOWN: ipv4:127.0.0.1:1: Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check "
         "failed.", "its certificate is not for the name that was dialled"),
        (f"UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): {VERIFY}: certificate has expired: OK",
         "its certificate has expired: renew it there"),
        (f"UNKNOWN: ipv4:1.2.3.4:1: Tls handshake failed: {VERIFY}: unable to get local issuer certificate: OK",
         "its certificate was refused here"),
        ("UNKNOWN: ipv4:1.2.3.4:1: Tls handshake failed: OPENSSL_internal:WRONG_VERSION_NUMBER: OK", "it speaks plaintext"),
        ("UNAVAILABLE: ipv4:1.2.3.4:1: Socket closed", "it wants a certificate that it accepts"),
        ("UNAVAILABLE: ipv4:1.2.3.4:1: recvmsg:Connection reset by peer", "it wants a certificate that it accepts"),
    ],
)  # fmt: skip
def test_whose_certificate_it_was_is_said_when_a_handshake_failed(details: str, words: str) -> None:
    assert words in cause(FAILED + details)
    assert in_words(FAILED + details, target="a:1").startswith("a:1: ")
    assert "ipv4" not in in_words(FAILED + details, target="a:1")


def test_other_reasons_are_passed_on_when_tls_has_nothing_to_do_with_it() -> None:
    details = FAILED + "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused"
    assert cause(details) == ""
    assert "Connection refused; is the server running" in in_words(details, target="a:1")
