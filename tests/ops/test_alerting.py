"""From a real fault to a message and back: coordinator and agent, Prometheus with the rules, Alertmanager, webhook."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.monitoring.alerts import GROUPS
from deploy.monitoring.rules import Alert, Group, Record, to_yaml
from kvdir.testing.prometheus_servers import Prometheus, Server, prometheus_server
from kvdir.testing.wait import eventually
from peer_agent.testing import sample_namespace
from peer_agent.testing.processes import ProcessCluster
from tests.ops.conftest import Webhook

within_a_minute = functools.partial(eventually, within_s=60)
ALERT = "KvdirNoCoordinator"
ALSO = {ALERT, "KvdirPublisherNotConnected", "KvdirCoordinatorDown"}
"""What the end of the only coordinator is called, from each side."""


@pytest.fixture
async def cluster() -> AsyncIterator[ProcessCluster]:
    with tempfile.TemporaryDirectory(prefix="kvdir-test-", dir="/dev/shm") as path:
        made = ProcessCluster(Path(path), sample_namespace())
        try:
            yield made
        finally:
            await made.close()


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """Those of the chart, but these three do not wait; the others keep their time, so that a slow machine sets off none."""
    hasty = [Group(group.name, [_hasty(rule) for rule in group.rules]) for group in GROUPS]
    (tmp_path / "rules.yaml").write_text(to_yaml(hasty))
    return tmp_path / "rules.yaml"


def _hasty(rule: Alert | Record) -> Alert | Record:
    return dataclasses.replace(rule, after="0m") if isinstance(rule, Alert) and rule.name in ALSO else rule


def firing(prometheus: Prometheus) -> set[str]:
    return {alert["labels"]["alertname"] for alert in prometheus.alerts() if alert["state"] == "firing"}


async def test_an_alert_reaches_the_webhook_and_resolves_when_the_only_coordinator_dies_and_comes_back(
    cluster: ProcessCluster, rules: Path, webhook: Webhook, alertmanager: Server
) -> None:
    http = ("--http-listen", "127.0.0.1:0")
    grpc = await cluster.start_coordinator(*http)
    coordinator = cluster.children["coordinator"]
    agent = await cluster.start_agent("a", grpc, *http)
    jobs = {"kvdir": [coordinator.ready["http"]], "peer-agent": [agent.ready["http"]]}
    with prometheus_server(jobs, rules=[rules], alertmanagers=[alertmanager.address]) as prometheus:
        built = "up == 1 and on (instance) (kvdir_build_info or peer_agent_build_info)"
        await within_a_minute(lambda: len(prometheus.query(built)) == 2, what="both are scraped")
        await within_a_minute(lambda: prometheus.query("peer_agent_publisher_connected == 1"), what="the agent publishes")
        await within_a_minute(lambda: not firing(prometheus), what="nothing is wrong")

        await coordinator.kill()
        await within_a_minute(lambda: webhook.named(ALERT, "firing"), what="the webhook hears of it")
        said = webhook.named(ALERT, "firing")[0]
        assert said["labels"]["severity"] == "critical"
        assert said["annotations"]["runbook_url"].endswith("runbook.md#kvdirnocoordinator")
        assert firing(prometheus) <= ALSO

        again = ("--http-listen", coordinator.ready["http"])
        await cluster.start_coordinator(*again, listen=grpc)
        await within_a_minute(lambda: webhook.named(ALERT, "resolved"), what="the webhook hears that it is over")
        await within_a_minute(lambda: not firing(prometheus), what="nothing is wrong any more")
