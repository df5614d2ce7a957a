"""Security: certificates, policy, and who is refused."""

from __future__ import annotations

from collections.abc import Callable

from deploy.monitoring.rules import PROCESS, Alert, Group, Severity


def _both(expression: Callable[[str], str]) -> str:
    """Of coordinators and of agents."""
    return "\nor\n".join(map(expression, ("kvdir", "peer_agent")))


def _expires_soon(prefix: str) -> str:
    ends = f"{prefix}_tls_expires_timestamp_seconds"
    left = f"({ends} > 0) - time()"
    late = [f"({left} < {days} * 86400 and {ends} == {ends} offset {24 * 2 * days:g}h)" for days in (7, 2, 0.25)]
    return "\nor\n".join((*late, f"({left} < 900)"))


_UNWELL = 'reason!~"epoch|ended"'


SECURITY = Group(
    "kvdir-security",
    (
        Alert(
            name="KvdirCertificateExpiresSoon", after="5m", expr=_both(_expires_soon),
            why=(
                "Whoever renews does so with a third of the life left: what has a week left, and was the same two weeks ago, "
                "was not renewed. Two days and six hours are for shorter lives, and for processes that have not run so long."
            ),
            summary="A certificate is about to end",
            description="The {{ $labels.port }} certificate of {{ $labels.instance }} ends in {{ $value | humanizeDuration }}.",
        ),
        Alert(
            name="KvdirCertificateExpired", after="0m", severity=Severity.CRITICAL,
            expr=_both(lambda prefix: f"({prefix}_tls_expires_timestamp_seconds > 0) - time() < 0"),
            why="Nobody connects to this process any more, and it to nobody; open connections go on until they end.",
            summary="A certificate has ended",
            description="The {{ $labels.port }} certificate of {{ $labels.instance }} has ended: new connections are refused.",
        ),
        Alert(
            name="KvdirTlsFilesRefused", after="5m", expr=_both(lambda prefix: f"{prefix}_tls_fault == 1"),
            why="Files are renewed one after the other, within seconds; for minutes they do not belong together.",
            summary="Renewed certificate files cannot be used",
            description="{{ $labels.instance }} goes on with the old certificate until it ends; /readyz says what is wrong.",
        ),
        Alert(
            name="KvdirPolicyRefused", after="5m", expr=_both(lambda prefix: f"{prefix}_policy_fault == 1"),
            why="A policy file that cannot be used is not: the last good one stays, so a change of rights has no effect.",
            summary="The policy file cannot be used",
            description="{{ $labels.instance }} keeps the last good policy; its log names all faults of the new one.",
        ),
        Alert(
            name="KvdirCallsRefused", after="0m",
            expr=_both(lambda prefix: f"sum by ({PROCESS}, reason) (increase({prefix}_auth_refused_total[10m])) > 20"),
            why=(
                "A wrong deployment or a probe makes a few; twenty in ten minutes is a client that will not stop, or an "
                "attack."
            ),
            summary="Calls are refused for who is calling",
            description=(
                "{{ $labels.instance }} refused {{ $value | humanize }} calls ({{ $labels.reason }}) within 10 minutes."
            ),
        ),
        Alert(
            name="KvdirCapabilitiesRefused", after="0m",
            expr=f"sum by ({PROCESS}, reason) (increase(peer_agent_capability_refused_total{{{_UNWELL}}}[10m])) > 20",
            why="A lock that ran out makes a few, after a stall; more is a reader that shows what it was never given. Not "
            "counted: epoch and ended, which every restart and every Unlock that passes a read makes.",
            summary="Reads are refused because they prove no lock",
            description=(
                "{{ $labels.instance }} refused {{ $value | humanize }} reads ({{ $labels.reason }}) within 10 minutes."
            ),
        ),
        Alert(
            name="KvdirLimitsHit", after="10m",
            expr=_both(lambda prefix: f"sum by ({PROCESS}, limit) (increase({prefix}_limited_total[5m])) > 0"),
            why="Limits protect against one client that asks too much; ten minutes of it is too small a limit, or that client.",
            summary="A limit refuses calls",
            description="{{ $labels.instance }} refused {{ $value | humanize }} calls for the limit of {{ $labels.limit }}.",
        ),
    ),
)  # fmt: skip
