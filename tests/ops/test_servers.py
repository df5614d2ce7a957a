"""The servers the other tests here lean on."""

from __future__ import annotations

import pytest

from kvdir.testing.prometheus_servers import QueryRefused, prometheus_server


def test_a_server_scrapes_and_answers_when_it_is_started() -> None:
    with prometheus_server({"nobody": ["127.0.0.1:1"]}) as prometheus:
        down = prometheus.until('up{job="nobody"}')
        assert [sample.value for sample in down] == [0.0]
        assert prometheus.query("1 + 1")[0].value == 2.0
        with pytest.raises(QueryRefused, match="unclosed left parenthesis"):
            prometheus.query("sum(")
    assert prometheus.process.poll() is not None
