"""`kvdir serve`: runs a coordinator in this process until SIGTERM or SIGINT. Logs go to stderr, one event a line."""

from __future__ import annotations

import sys

import click
import msgspec

from kvdir.cli.options import config_options
from kvdir.cli.output import output_option
from kvdir.server.config import CoordinatorConfig


@click.command()
@output_option
@config_options(CoordinatorConfig, prefix="KVDIR_")
def serve(config: CoordinatorConfig, output: str) -> None:
    """Run a coordinator.

    \b
    Examples:
      kvdir serve
      kvdir serve --listen 127.0.0.1:0 --output json    a free port, announced as JSON on stdout
      kvdir serve --listen 0.0.0.0:7400 --tls-cert c.pem --tls-key c.key --tls-ca ca.pem     for whom the CA signed
      kvdir serve --listen 0.0.0.0:7400 --insecure      reachable by everybody on the network
      kvdir serve --indexer-listen 127.0.0.1:7404       and routers may ask over HTTP (docs/engines/routers.md)
      kvdir serve --store redis://127.0.0.1:6379        one of several that keep their directory in Redis together
    """
    from kvdir.obs.logs import configure
    from kvdir.server.serve import Bound, run

    def announce(bound: Bound) -> None:
        if output == "json":
            ready = {"event": "ready", "grpc": bound.grpc, "http": bound.http, "version": bound.version}
            if bound.page:
                ready["page"] = bound.page
            if bound.health:
                ready["health"] = bound.health
            if bound.indexer:
                ready["indexer"] = bound.indexer
            if bound.health:
                ready["health"] = bound.health
            sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        else:
            http = f", http://{bound.http}/metrics" if bound.http else ""
            indexer = f", http://{bound.indexer}/query" if bound.indexer else ""
            page = f"; its page: http://{bound.page}/" if bound.page else ""
            sys.stdout.write(f"kvdir {bound.version} serves on {bound.grpc}{http}{indexer}{page}; stop it with Ctrl-C\n")
        sys.stdout.flush()

    configure(config.log_level, config.log_format)
    run(config, on_ready=announce)
