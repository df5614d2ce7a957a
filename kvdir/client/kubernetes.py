"""The endpoints of a Kubernetes Service: its EndpointSlices, listed once and then watched, over HTTPS with the pod's account.

Rules: the token is read for every request (it is rotated on disk); a watch goes on from the last resourceVersion, and begins
anew with a list when that is too old (410 Gone); silence ends (the server is told to end a watch after WATCH_S, the socket a
little later). Endpoints that are not ready count, too: a coordinator is not ready while it warms, and it warms by being
published to. Only those that terminate do not. A pod that a slice of each family names (dual stack) counts once, by its IPv4
address. Needs get, list and watch on endpointslices in the namespace.
Source: Kubernetes API concepts ("Efficient detection of changes"), discovery.k8s.io/v1. Not tested against a cluster.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_S = 240
_SILENCE_S = 15.0
_MAX_LINE_BYTES, _MAX_REASON_BYTES = 4 << 20, 2048
_PAUSE_S, _PAUSE_MAX_S = 1.0, 30.0
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError)
"""What an answer of another shape than expected leads to."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API is, and who we are. certificates: of its CA, a file; None: plain HTTP, for tests."""

    host: str
    port: int
    token: Path
    certificates: Path | None

    @classmethod
    def in_cluster(cls) -> ApiServer:
        """As every pod finds it. OSError outside of a pod."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port:
            raise OSError("no Kubernetes here: KUBERNETES_SERVICE_HOST is not set; k8s:/// works inside of a pod only")
        return cls(host, int(port), ACCOUNT / "token", ACCOUNT / "ca.crt")

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.certificates is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=str(self.certificates))
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)


class Gone(OSError):
    """The resourceVersion is older than what the API keeps: list again."""


class EndpointSlices:
    """Implements discovery.Source. api: called for each attempt, so that what is missing now may be there later."""

    def __init__(self, service: str, namespace: str, port: str, *, api: Callable[[], ApiServer]) -> None:
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service}"
        self._port = port
        self._name = f"k8s:///{service}.{namespace}:{port}"
        self._api = api
        self._slices: dict[str, list[tuple[str, str]]] = {}  # (pod, address)
        self._version = ""
        self._socket: socket.socket | None = None
        self._interrupted = False

    def run(self, said: Callable[[tuple[str, ...]], None], failed: Callable[[str], None], stop: threading.Event) -> None:
        pause_s = _PAUSE_S
        while not stop.is_set():
            try:
                if not self._version:
                    self._list()
                    said(self._addresses())
                for event in self._watch(stop):
                    self._take(event)
                    said(self._addresses())
                pause_s = _PAUSE_S
            except Gone:
                self._version = ""
            except (OSError, http.client.HTTPException, *_NONSENSE) as error:
                self._version = ""
                if not stop.is_set():
                    failed(f"{self._name}: {error}")
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            # Also where a watch has ended as it should, so that one which ends at once cannot spin; never all agents at once.
            stop.wait(pause_s * random.uniform(0.5, 1.0))

    def interrupt(self) -> None:
        """What is being read ends at once."""
        self._interrupted = True
        connected = self._socket
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    # -- the API -----------------------------------------------------------------------------------------------------------

    def _list(self) -> None:
        with self._get({}) as response:
            document = json.loads(response.read())
        self._slices = {item["metadata"]["name"]: self._addresses_of(item) for item in document.get("items") or ()}
        self._version = document["metadata"]["resourceVersion"]

    def _watch(self, stop: threading.Event) -> Iterator[dict[str, Any]]:
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_S),
        }
        with self._get(query, silence_s=WATCH_S + _SILENCE_S) as response:
            while not stop.is_set() and (line := response.readline(_MAX_LINE_BYTES)):
                if line.strip():
                    yield json.loads(line)

    @contextmanager
    def _get(self, query: dict[str, str], *, silence_s: float = _SILENCE_S) -> Iterator[http.client.HTTPResponse]:
        api = self._api()
        connection = api.connect(_SILENCE_S)
        path = f"{self._path}?{urlencode({'labelSelector': self._selector, **query})}"
        headers = {"Authorization": f"Bearer {api.token.read_text().strip()}", "Accept": "application/json"}
        try:
            connection.request("GET", path, headers=headers)
            self._socket = connection.sock
            if self._interrupted:  # before there was a socket to shut
                raise OSError("interrupted")
            connection.sock.settimeout(silence_s)
            with connection.getresponse() as response:
                if response.status == http.client.GONE:
                    raise Gone("the resourceVersion is too old")
                if response.status != http.client.OK:
                    raise OSError(_refusal(response.status, response.read(_MAX_REASON_BYTES).decode(errors="replace")))
                yield response
        finally:
            self._socket = None
            connection.close()

    # -- what it says ------------------------------------------------------------------------------------------------------

    def _take(self, event: dict[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == http.client.GONE:
                raise Gone(item.get("message", ""))
            raise OSError(_refusal(item.get("code", 0), item.get("message", "")))
        self._version = item["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._slices.pop(item["metadata"]["name"], None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[item["metadata"]["name"]] = self._addresses_of(item)

    def _addresses_of(self, item: dict[str, Any]) -> list[tuple[str, str]]:
        port = self._port
        if not port.isdigit():
            ports = [entry.get("port") for entry in item.get("ports") or () if entry.get("name") == port]
            if not ports or not ports[0]:
                return []
            port = str(ports[0])
        found = []
        for endpoint in item.get("endpoints") or ():
            if not (endpoint.get("conditions") or {}).get("terminating"):
                host = endpoint["addresses"][0]  # if there are more, any will do
                address = f"[{host}]:{port}" if item.get("addressType") == "IPv6" else f"{host}:{port}"
                found.append(((endpoint.get("targetRef") or {}).get("uid") or address, address))
        return found

    def _addresses(self) -> tuple[str, ...]:
        chosen: dict[str, str] = {}
        for address, pod in sorted((address, pod) for found in self._slices.values() for pod, address in found):
            chosen.setdefault(pod, address)  # digits sort before brackets: IPv4 first
        return tuple(dict.fromkeys(chosen.values()))


def _refusal(status: int, reason: str) -> str:
    with suppress(ValueError, AttributeError):
        reason = json.loads(reason).get("message", reason)
    if status == http.client.FORBIDDEN:
        return f"forbidden: let the pod's service account get, list and watch endpointslices (discovery.k8s.io): {reason}"
    return f"the API answered {status}: {reason}"
