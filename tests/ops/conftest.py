"""For tests of operations (`make test-ops`): the chart's rules, dashboards, page, TLS, tenants, against the real tools.

They are deselected otherwise, because they need programs that tests/ops/install.sh brings, and not even read where the packages
of the extra `ops-tests` are missing (`make test-ops` installs them).
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvdir.testing.prometheus_servers import Prometheus, Server, alertmanager_server, prometheus_server

collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py", "page"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ops)
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture
def start_prometheus() -> Callable[..., AbstractContextManager[Prometheus]]:
    """`with start_prometheus({"kvdir": [address]}, rules=[path]) as prometheus`; it is gone when the block ends."""
    return prometheus_server


class Webhook:
    """Receives what an Alertmanager sends. alerts: as it came, in order."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        received = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.extend(body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Silent: the alerts are what counts."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def named(self, alert: str, status: str) -> list[dict[str, Any]]:
        """Of one alert: firing or resolved."""
        return [item for item in self.alerts if item["labels"]["alertname"] == alert and item["status"] == status]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    made = Webhook()
    yield made
    made.close()


@pytest.fixture
def alertmanager(webhook: Webhook) -> Iterator[Server]:
    """A real Alertmanager that sends everything to `webhook` at once."""
    with alertmanager_server(webhook.url) as server:
        yield server
