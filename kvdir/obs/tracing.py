"""How a daemon traces, from its settings: the tracer, and its exporter if spans go anywhere.

The one place beside kvdir/config.py that reads the environment: OpenTelemetry's variables are shared by all processes of a pod.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdir.obs.logs import figures, say
from kvdir.obs.spans import NO_TRACER, Tracer, Value

if TYPE_CHECKING:
    from kvdir.obs.otlp import Exporter
    from kvdir.obs.tally import Tally

log = logging.getLogger("kvdir.otlp")

SPANS_S = 2.0
"""Of the grace of a daemon that stops, at most, for its last spans."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """exporter: None while spans go nowhere; then none is made."""

    tracer: Tracer = NO_TRACER
    exporter: Exporter | None = None

    def watched_by(self, tally: Tally) -> None:
        """Its spans and the lines of this process's log are among those figures."""
        tally.watch("log_lines_dropped_total", lambda: figures().dropped)
        tally.watch("log_lines_suppressed_total", lambda: figures().suppressed)
        if (exporter := self.exporter) is not None:
            tally.watch("spans_total", lambda: exporter.figures.exported, "exported")
            tally.watch("spans_total", lambda: exporter.figures.dropped, "dropped")
            tally.watch("spans_total", lambda: exporter.figures.refused, "failed")

    def close(self, *, grace_s: float) -> None:
        """Delivers what is left. Waits: call it from a thread."""
        if self.exporter is not None:
            self.exporter.close(grace_s=grace_s)


def trace_faults(endpoint: str, ratio: float) -> list[str]:
    """What is wrong with these settings."""
    from kvdir.obs.otlp import url_fault

    out = []
    if endpoint and (fault := url_fault(endpoint)):
        out.append(f"otlp_endpoint: {fault}")
    if not 0 <= ratio <= 1:
        out.append("trace_ratio: must be 0 to 1")
    return out


def open_tracing(
    endpoint: str,
    ratio: float,
    *,
    service: str,
    instance: str,
    version: str,
    process: str = "main",
    environ: Mapping[str, str] | None = None,
) -> Tracing:
    """service, instance: as traces name us. What the environment says wrongly is logged, and spans go nowhere."""
    from kvdir.obs.otlp import Exporter, collector, header_fault, url_fault

    chosen = collector(endpoint, os.environ if environ is None else environ)
    if chosen is None:
        if ratio:
            say(log, logging.WARNING, "trace_ratio has no effect without otlp_endpoint")
        return Tracing()
    if fault := url_fault(chosen.url):
        say(log, logging.WARNING, "OTEL_EXPORTER_OTLP_ENDPOINT cannot be used, spans go nowhere", reason=fault)
        return Tracing()
    if fault := header_fault(chosen.headers):
        say(log, logging.WARNING, "OTEL_EXPORTER_OTLP_HEADERS cannot be used, spans go nowhere", reason=fault)
        return Tracing()
    resource: dict[str, Value] = {
        "service.name": service,
        "service.instance.id": instance,
        "service.version": version,
        "process.pid": os.getpid(),
        "kvdir.process": process,
    }
    exporter = Exporter(chosen, resource)
    return Tracing(Tracer(exporter, ratio), exporter)
