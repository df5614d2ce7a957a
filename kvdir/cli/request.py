"""--trace and --request-id: of commands whose calls can be followed through coordinator and agents (docs/observability.md)."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

import click

from kvdir.obs import trace
from kvdir.obs.trace import TraceContext

NEW = "new"


def request_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command's calls carry what was given; `trace.trace_id()` says inside which trace that is."""

    @functools.wraps(function)
    def command(*args: Any, trace_option: str, request_id: str, **params: Any) -> Any:
        with trace.within(_context(trace_option), request_id=request_id):
            return function(*args, **params)

    chosen = click.option(
        "--trace",
        "trace_option",
        default="",
        metavar="TRACEPARENT",
        help="W3C trace to be part of; new: a sampled one.",
    )
    named = click.option("--request-id", default="", metavar="TEXT", help="Name of this request in all logs about it.")
    return chosen(named(command))


def _context(text: str) -> TraceContext | None:
    if not text:
        return None
    if text == NEW:
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8), True)
    context = trace.parse(text)
    if context is None:
        raise click.UsageError(f"--trace: {text!r} is no traceparent: write 00-<32 hex digits>-<16 hex digits>-01, or new")
    return context
