"""Why nothing hits: checks over gathered facts. Pure; who gathers the facts is in kvdir/cli/doctor.py and peer_agent/cli.

A check is a function from facts to findings: one that is in order says so, too. No check asks anybody or reads a clock.
"""

from kvdir.diagnosis.finding import Finding, Verdict, in_order, worst

__all__ = ["Finding", "Verdict", "in_order", "worst"]
