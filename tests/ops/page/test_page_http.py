"""The page's paths without a browser: who is let in, how many, what they may send, and that nobody waits for the slow."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from kvdir.server.page.feed import Feed
from kvdir.server.page.routes import HEADERS, MAX_BODY_BYTES
from kvdir.testing.page_fleet import FleetSource, page_server
from kvdir.testing.wait import eventually, wait_until

MAX_VIEWERS = 3


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with page_server(FleetSource(20), max_viewers=MAX_VIEWERS, interval_s=0.05) as url:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        yield parts.hostname, parts.port


def ask(
    address: tuple[str, int], method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection(*address, timeout=30)) as connection:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def watch(address: tuple[str, int], *, room_bytes: int = 0) -> socket.socket:
    """A viewer that has read nothing yet. room_bytes: of its receive buffer."""
    viewer = socket.socket()
    if room_bytes:
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
    viewer.settimeout(30)
    viewer.connect(address)
    viewer.sendall(f"GET /page/events HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n\r\n".encode())
    return viewer


def numbers(viewer: socket.socket, *, count: int) -> list[int]:
    """Of so many pictures that come."""
    out: list[int] = []
    with viewer.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                out.append(json.loads(line[6:])["number"])
                if len(out) == count:
                    break
    return out


def test_nothing_but_the_page_itself_may_run_or_be_loaded_and_nobody_may_frame_it(address: tuple[str, int]) -> None:
    status, headers, body = ask(address, "GET", "/")
    assert status == 200
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "'unsafe" not in headers["Content-Security-Policy"]
    assert b"<script>" not in body
    assert b"style=" not in body
    assert b"http" not in body.replace(b"http-equiv", b""), "nothing is loaded from elsewhere"


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/page.css", "/page/events", "/page/node?name=node-001"])
def test_nobody_who_came_by_another_name_is_answered(address: tuple[str, int], path: str) -> None:
    assert ask(address, "GET", path, Host="evil.example:80")[0] == 403
    assert ask(address, "GET", path, Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(address, "GET", path, Origin="http://evil.example")[0] == 403
    assert ask(address, "HEAD", path, Host=f"localhost:{address[1]}")[0] == 200


def test_a_link_from_elsewhere_opens_the_page_and_shows_that_site_nothing(address: tuple[str, int]) -> None:
    came = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    status, headers, _ = ask(address, "GET", "/", **came)
    assert (status, headers["Cross-Origin-Opener-Policy"]) == (200, "same-origin")
    assert ask(address, "GET", "/", **{**came, "Sec_Fetch_Dest": "iframe"})[0] == 403
    assert ask(address, "GET", "/page/events", **came)[0] == 403
    assert ask(address, "GET", "/", **came, Host="evil.example")[0] == 403


def test_a_body_that_does_not_come_keeps_no_thread(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdir.server.page.routes.BODY_S", 0.1)
    head = f"POST /page/explain HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with socket.create_connection(address, timeout=30) as asker:
        asker.sendall(f"{head}{{".encode())
        assert asker.recv(1) == b"", "closed, and nothing answered"


def test_questions_are_of_the_page_itself_bounded_and_read_only(address: tuple[str, int]) -> None:
    json_kind = {"Content_Type": "application/json"}
    question = json.dumps({"text": "00" * 32}).encode()
    assert ask(address, "POST", "/page/explain", question, **json_kind)[0] == 200
    assert ask(address, "POST", "/page/explain", question, Content_Type="text/plain")[0] == 400, (
        "what a form of another site can send"
    )
    assert ask(address, "POST", "/page/explain", question, Origin="http://evil.example", **json_kind)[0] == 403
    assert ask(address, "POST", "/page/node", question, **json_kind)[0] == 404
    status, _, body = ask(address, "POST", "/page/explain", b"x", **json_kind, Content_Length=str(MAX_BODY_BYTES + 1))
    assert (status, str(MAX_BODY_BYTES).encode() in body) == (413, True)
    for body in (b"", b"[]", b'{"text": 1}', b'{"text": "00", "other": 1}', json.dumps({"text": "no such request"}).encode()):
        status, _, said = ask(address, "POST", "/page/explain", body, **json_kind)
        assert (status, bool(json.loads(said)["error"])) == (200, True)


def test_an_unknown_path_and_an_unknown_node_say_so(address: tuple[str, int]) -> None:
    assert ask(address, "GET", "/page/../../etc/passwd")[0] == 404
    assert ask(address, "GET", "/page/node?" + "a=b&" * 500)[0] == 200
    assert b"error" not in ask(address, "GET", "/page/node?name=node%2D001")[2][:20]
    status, _, body = ask(address, "GET", "/page/node?name=nobody")
    assert (status, "nobody" in json.loads(body)["error"]) == (200, True)


def test_viewers_are_bounded_and_one_that_leaves_makes_room(address: tuple[str, int]) -> None:
    viewers = [watch(address) for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        assert numbers(viewer, count=1)
    status, _, body = ask(address, "GET", "/page/events")
    assert (status, str(MAX_VIEWERS).encode() in body) == (503, True)
    viewers.pop().close()
    wait_until(lambda: ask(address, "HEAD", "/page/events")[0] == 200, "there is room again")
    with watch(address) as late:
        assert numbers(late, count=1)
    for viewer in viewers:
        viewer.close()


async def test_a_viewer_that_reads_nothing_misses_pictures_and_holds_nobody_up() -> None:
    feed = Feed(FleetSource(20), asyncio.get_running_loop(), interval_s=0.001)
    pairs = [socket.socketpair() for _ in range(2)]
    (slow, slow_end), (other, other_end) = pairs
    slow_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # less than a picture
    try:
        assert feed.join(slow_end)
        assert feed.join(other_end)
        seen = await asyncio.to_thread(numbers, other, count=20)
        assert seen == list(range(seen[0], seen[0] + 20)), "who reads misses none"
        late = await asyncio.to_thread(numbers, slow, count=2)
        assert late[-1] - late[0] > 2, "what it did not take in time was skipped, not kept"
    finally:
        slow.close()
        other.close()
        await feed.close()


async def test_viewers_that_come_and_go_cost_no_more_pictures_than_one_that_stays() -> None:
    source = FleetSource(3)
    feed = Feed(source, asyncio.get_running_loop(), interval_s=0.001, busy=1e-5)
    first, first_end = socket.socketpair()
    try:
        assert feed.join(first_end)
        assert await asyncio.to_thread(numbers, first, count=1) == [1]
        for _ in range(5):
            ours, theirs = socket.socketpair()
            with ours:
                assert feed.join(theirs)
                assert await asyncio.to_thread(ours.recv, 64), "told what was before"
        assert source.copies == 1
    finally:
        first.close()
        await feed.close()


async def test_pictures_end_with_their_last_viewer() -> None:
    source, loop = FleetSource(3), asyncio.get_running_loop()
    feed = Feed(source, loop, interval_s=0.001)
    ours, theirs = socket.socketpair()
    try:
        assert feed.join(theirs)
        await eventually(lambda: source.copies > 3, what="it is watched")
        ours.close()
        await eventually(lambda: feed.viewers == 0, what="that it left is noticed")
        copies = source.copies
        theirs_too, ours_too = socket.socketpair()
        assert feed.join(theirs_too)
        await eventually(lambda: source.copies > copies, what="a new viewer is shown something")
        ours_too.close()
    finally:
        await feed.close()
