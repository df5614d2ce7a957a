"""The part of the Kubernetes API that discovery reads, over HTTP: list and watch of EndpointSlices, with resource versions.

    with FakeKubernetes(directory) as cluster:
        cluster.put("web-abc", ["10.0.0.1", "10.0.0.2"])
        Discovery("k8s:///web.prod:7400", api=cluster.api)

As the real one: a watch begins behind the resourceVersion that it names and is refused (an ERROR event with code 410) when that
was compacted away; BOOKMARK events carry versions alone; requests without the current token get 401; a watch ends by itself
after timeoutSeconds. Shapes: discovery.k8s.io/v1, Kubernetes 1.21 and newer. Does not: select by label, or page.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlparse

from kvdir.client.kubernetes import ApiServer

_POLL_S = 0.02


class FakeKubernetes:
    """See the module docstring. requests: paths with queries, as they came. watches: under way. tls: of the server, if any.

    instead: what lists are answered with, if not empty.
    """

    def __init__(self, directory: Path, *, tls: ssl.SSLContext | None = None) -> None:
        self.instead = b""
        self._tls = tls
        self.requests: list[str] = []
        self.watches = 0
        self._token_file = directory / "token"
        self._changed = threading.Condition()
        self._version = 100
        self._oldest = 100
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._broken = 0
        self._closed = False
        self.rotate("first-token")

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def api(self, *, certificates: Path | None = None) -> ApiServer:
        return ApiServer("127.0.0.1", self._server.server_address[1], self._token_file, certificates)

    # -- what happens in the cluster ---------------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        ready: list[str],
        *,
        unready: tuple[str, ...] = (),
        terminating: tuple[str, ...] = (),
        family: str = "IPv4",
        pods: tuple[str, ...] = (),
    ) -> None:
        """A slice is there, or changes. pods: uid behind each address, ready ones first; none given: another one for each."""
        states = [(host, True, False) for host in ready] + [(host, False, False) for host in unready]
        states += [(host, False, True) for host in terminating]
        uids = pods or [f"uid-of-{host}" for host, *_ in states]
        endpoints = [
            {
                "addresses": [host],
                "conditions": {"ready": up, "serving": up, "terminating": ends},
                "targetRef": {"kind": "Pod", "name": f"{name}-{uid}", "uid": uid},
            }
            for (host, up, ends), uid in zip(states, uids, strict=True)
        ]
        with self._changed:
            kind = "MODIFIED" if name in self._slices else "ADDED"
            self._version += 1
            self._slices[name] = {
                "kind": "EndpointSlice",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"name": name, "resourceVersion": str(self._version)},
                "addressType": family,
                "endpoints": endpoints or None,
                "ports": [{"name": "grpc", "port": 7400, "protocol": "TCP"}],
            }
            self._say(kind, self._slices[name])

    def delete(self, name: str) -> None:
        with self._changed:
            self._version += 1
            item = self._slices.pop(name)
            self._say("DELETED", {**item, "metadata": {"name": name, "resourceVersion": str(self._version)}})

    def bookmark(self) -> None:
        """Time has passed elsewhere: watches learn a newer version."""
        with self._changed:
            self._version += 10
            metadata = {"resourceVersion": str(self._version), "creationTimestamp": None}
            self._say("BOOKMARK", {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata})

    def compact(self) -> None:
        """Older versions are forgotten; watches under way end."""
        with self._changed:
            self._version += 10
            self._oldest = self._version
            self._events.clear()
        self.drop_watches()

    def drop_watches(self) -> None:
        """The connections of watches end, as when the API server restarts."""
        with self._changed:
            self._broken += 1
            self._changed.notify_all()

    def rotate(self, token: str) -> None:
        """The token in the pod's file, and the one that is accepted, change."""
        self._token = token
        self._token_file.write_text(token + "\n")

    def revoke(self) -> None:
        """The file's token is not accepted any more."""
        self._token = ""

    # -- HTTP --------------------------------------------------------------------------------------------------------------

    def _say(self, kind: str, item: dict[str, Any]) -> None:
        self._events.append((self._version, {"type": kind, "object": item}))
        self._changed.notify_all()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        if not self._token or handler.headers.get("Authorization") != f"Bearer {self._token}":
            status = {"kind": "Status", "status": "Failure", "message": "Unauthorized", "reason": "Unauthorized", "code": 401}
            self._document(handler, 401, status)
            return
        query = {key: values[0] for key, values in parse_qs(urlparse(handler.path).query).items()}
        if "watch" in query:
            self._watch(handler, int(query["resourceVersion"]), float(query["timeoutSeconds"]))
            return
        with self._changed:
            document = {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": str(self._version)},
                "items": list(self._slices.values()),
            }
        self._document(handler, 200, document)

    def _document(self, handler: BaseHTTPRequestHandler, status: int, document: dict[str, Any]) -> None:
        body = self.instead or json.dumps(document).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _watch(self, handler: BaseHTTPRequestHandler, version: int, timeout_s: float) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.close_connection = True
        end_s, broken = time.monotonic() + timeout_s, self._broken
        self.watches += 1
        try:
            if version < self._oldest:
                message = f"too old resource version: {version} ({self._oldest})"
                status = {"kind": "Status", "status": "Failure", "message": message, "reason": "Expired", "code": 410}
                _chunk(handler, {"type": "ERROR", "object": status})
            else:
                while (event := self._next(version, end_s, broken)) is not None:
                    version = event[0]
                    _chunk(handler, event[1])
            handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            return  # nobody reads any more
        finally:
            self.watches -= 1

    def _next(self, version: int, end_s: float, broken: int) -> tuple[int, dict[str, Any]] | None:
        with self._changed:
            while not self._closed and broken == self._broken and (left_s := end_s - time.monotonic()) > 0:
                newer = next((event for event in self._events if event[0] > version), None)
                if newer is not None:
                    return newer
                self._changed.wait(left_s)
        return None


def _chunk(handler: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
    line = json.dumps(event).encode() + b"\n"
    handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
    handler.wfile.flush()
