"""The HTTP side of a daemon: what it answers, and that nobody who is silent or slow keeps it from answering others."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import math
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvdir.obs import door
from kvdir.obs.definition import Buckets, Definition, Family, Kind, Label
from kvdir.obs.exposition import OPENMETRICS, TEXT, render
from kvdir.obs.http import HttpSide, send
from kvdir.obs.labels import CALL_BUCKETS_S
from kvdir.obs.tally import Tally

ANY = Label("node", bound=2_000, why="test")
ODD = 'back\\slash "quoted"\nsecond line'
ANSWER_S = 30.0


def odd_families() -> Iterator[Family]:
    yield (
        Family(Definition("kvdir_a", Kind.GAUGE, "Help with \\ in it.", (ANY,)))
        .add(1.5, ODD)
        .add(math.inf, "n1")
        .add(-0.0, "n2")
        .add(math.nan, "n3")
        .add(2**53, "n4")
        .add(5e-324, "n5")
    )
    yield Family(Definition("kvdir_b_total", Kind.COUNTER, "B.", ())).add(3)
    exemplars = {2: ({"trace_id": "f" * 32}, 1e-4, 1700000000.5)}
    took = Buckets([1] * (len(CALL_BUCKETS_S) + 1), 2.25, exemplars)
    yield Family(Definition("kvdir_c_seconds", Kind.HISTOGRAM, "C.", (ANY,), CALL_BUCKETS_S)).add_buckets(took, "n1")
    yield Family(Definition("kvdir_d_info", Kind.INFO, "D.", (ANY,))).add(1, "n1")
    yield Family(Definition("kvdir_e", Kind.GAUGE, "Nothing in it.", (ANY,)))


class Source:
    """Figures that take a while to make."""

    def __init__(self, nodes: int = 1) -> None:
        self.tally = Tally("kvdir")
        self.nodes = nodes
        self.made = 0
        self.hold = threading.Event()
        self.hold.set()

    def collect(self) -> Iterator[Family]:
        self.made += 1
        assert self.hold.wait(ANSWER_S)
        family = Family(Definition("kvdir_a", Kind.GAUGE, "A.", (ANY,)))
        for number in range(self.nodes):
            family.add(number, f"a-node-with-a-long-name-{number}")
        yield family
        yield from self.tally.families()


@contextlib.contextmanager
def serving(source: Source, *, fault: str = "", further: object = None) -> Iterator[HttpSide]:
    with HttpSide(
        ("127.0.0.1", 0), source, alive=lambda: "", ready=lambda: fault, remark=lambda: "(remark)", further=further
    ) as side:  # type: ignore[arg-type]
        yield side


def ask(side: HttpSide, path: str, *, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*side.address, timeout=ANSWER_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


class _Registered:
    def collect(self) -> Iterator[Family]:
        return odd_families()


def test_text_is_what_prometheus_own_client_writes_when_values_are_odd() -> None:
    registry = CollectorRegistry()
    registry.register(_Registered())  # type: ignore[arg-type]

    def samples(text: str) -> list[tuple[str, list[tuple[str, str]], str]]:
        return [
            (sample.name, sorted(sample.labels.items()), repr(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    ours = render(odd_families(), TEXT).decode()
    assert samples(ours) == samples(generate_latest(registry).decode())
    assert "trace_id" not in ours


def test_openmetrics_is_read_with_its_exemplars_when_values_are_odd() -> None:
    families = {family.name: family for family in parse_openmetrics(render(odd_families(), OPENMETRICS).decode())}
    assert families["kvdir_a"].samples[0].labels == {"node": ODD}
    assert families["kvdir_b"].type == "counter"
    (with_trace,) = [sample for sample in families["kvdir_c_seconds"].samples if sample.exemplar is not None]
    assert with_trace.exemplar.labels == {"trace_id": "f" * 32}
    assert with_trace.labels["le"] == repr(CALL_BUCKETS_S[2])


def test_format_and_packing_follow_the_headers_when_metrics_are_asked_for() -> None:
    with serving(Source(nodes=500)) as side:
        status, headers, body = ask(side, "/metrics")
        assert (status, headers["Content-Type"], headers["Content-Encoding"]) == (200, TEXT, None)
        assert b"process_cpu_seconds_total" in body
        status, headers, body = ask(side, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert headers["Content-Type"] == OPENMETRICS
        assert body.endswith(b"# EOF\n")
        _, headers, packed = ask(side, "/metrics?x=1", Accept_Encoding="gzip, deflate")
        assert headers["Content-Encoding"] == "gzip"
        assert len(packed) < len(gzip.decompress(packed)) / 4
        status, headers, body = ask(side, "/metrics", method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 10_000


def test_packing_is_not_used_when_the_client_says_no() -> None:
    with serving(Source(nodes=500)) as side:
        for said in ("gzip;q=0", "x-gzip-like", "identity"):
            assert ask(side, "/metrics", Accept_Encoding=said)[1]["Content-Encoding"] is None
        assert ask(side, "/metrics", Accept_Encoding="deflate, GZIP ; q=0.5")[1]["Content-Encoding"] == "gzip"
        assert ask(side, "/metrics", Accept="application/openmetrics-text;q=0, text/plain")[1]["Content-Type"] == TEXT


def test_scraper_is_told_when_a_collector_has_a_bug() -> None:
    source = Source()

    def broken() -> float:
        raise KeyError("gone")

    source.tally.watch("loop_lag_seconds", broken)
    with serving(source) as side:
        status, _, words = ask(side, "/metrics")
        assert (status, b"http request failed" in words) == (500, True)
        assert ask(side, "/healthz")[0] == 200


def test_probes_say_why_when_something_is_wrong() -> None:
    with serving(Source(), fault="warming") as side:
        assert ask(side, "/healthz")[::2] == (200, b"ok\n")
        assert ask(side, "/readyz")[::2] == (503, b"warming\n")
        assert ask(side, "/elsewhere")[0] == 404
    with serving(Source()) as side:
        assert ask(side, "/readyz")[::2] == (200, b"ok (remark)\n")


def test_scrapers_share_one_answer_when_they_ask_at_the_same_time() -> None:
    source = Source()
    source.hold.clear()
    answers: list[int] = []
    with serving(source) as side:
        scrapers = [threading.Thread(target=lambda: answers.append(ask(side, "/metrics")[0])) for _ in range(5)]
        for scraper in scrapers:
            scraper.start()
        assert ask(side, "/healthz")[0] == 200  # while all of them wait
        source.hold.set()
        for scraper in scrapers:
            scraper.join(ANSWER_S)
    assert answers == [200] * 5
    assert source.made <= 3


def test_probes_and_scrapes_are_answered_when_a_thousand_connections_say_nothing() -> None:
    with serving(Source()) as side, contextlib.ExitStack() as stack:
        for number in range(1_000):
            connection = stack.enter_context(socket.create_connection(side.address, timeout=ANSWER_S))
            if number % 2:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHos")
        assert ask(side, "/healthz")[0] == 200
        assert ask(side, "/metrics")[0] == 200


def test_probes_are_answered_when_every_scraper_reads_nothing() -> None:
    with serving(Source(nodes=2_000)) as side, contextlib.ExitStack() as stack:
        for _ in range(4 * door.THREADS):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(side.address)
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert ask(side, "/readyz")[0] == 200


@pytest.mark.parametrize("said", [b"\x00\xff" * 9_000, b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"GET /healthz HTTP/9.9\r\n\r\n"])
def test_the_next_one_is_answered_when_somebody_talks_nonsense(said: bytes) -> None:
    with serving(Source()) as side:
        with socket.create_connection(side.address, timeout=ANSWER_S) as connection, contextlib.suppress(OSError):
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        assert ask(side, "/healthz")[0] == 200


def test_a_page_with_a_bug_costs_one_answer_when_it_is_asked_for() -> None:
    def further(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/bug":
            raise RuntimeError("bug")
        send(request, 200, "text/plain", b"other")

    with serving(Source(), further=further) as side:
        for _ in range(door.THREADS + 1):
            with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
                ask(side, "/bug")
        assert ask(side, "/other")[::2] == (200, b"other")


def test_nobody_is_kept_waiting_when_the_side_closes() -> None:
    with serving(Source()) as side:
        waiting = socket.create_connection(side.address, timeout=ANSWER_S)
    with waiting:
        assert waiting.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(side.address, timeout=ANSWER_S)
