"""Runs in kvdir's own environment: starts a daemon with a file that the chart rendered, and asks it what the kubelet would ask.

    python tests/helm/live.py MODULE FILE NAME...     probes by the names of their services; a JSON of name to status on stdout

The process gets free ports on loopback and its files below the directory of FILE, by variables, which win over the file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_S, STOP_S = 10.0, 20.0


def main() -> int:
    module, file, *names = sys.argv[1:]
    prefix = {"kvdir": "KVDIR_", "peer_agent": "PEER_AGENT_"}[module]
    ports = ("LISTEN", "HTTP_LISTEN", "HEALTH_LISTEN") + (("PAGE_LISTEN",) if module == "kvdir" else ("DATA_LISTEN",))
    environ = dict(os.environ) | {f"{prefix}{name}": "127.0.0.1:0" for name in ports}
    if module == "kvdir":
        environ["KVDIR_WARM_LIMIT_S"] = "0"  # nobody publishes here
    if module == "peer_agent":
        here = Path(file).parent
        environ |= {
            "PEER_AGENT_NODE": "node",
            "PEER_AGENT_ADVERTISE": "127.0.0.1:7410",
            "PEER_AGENT_ACCEPT_BYTES": "4MiB",
            "PEER_AGENT_ARENA_PATH": f"/dev/shm/kvdir-helm-{os.getpid()}",
            "PEER_AGENT_REPLICA_PATH": f"/dev/shm/kvdir-helm-{os.getpid()}.replica",
            "PEER_AGENT_ENGINE_LISTEN": f"unix:{here}/agent.sock",
        }
    command = [sys.executable, "-m", module, "serve", "--config", file, "--output", "json"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            found = {name: probe(ready["health"], name) for name in names}
        finally:
            process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_S)
    json.dump({"probes": found, "code": code}, sys.stdout)
    return 0


def probe(address: str, service: str) -> str:
    """As the kubelet: plaintext, no certificate, again until the answer is yes, or for so long."""
    end_s = time.monotonic() + PROBE_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_S).status
            if status == health_pb2.HealthCheckResponse.SERVING or time.monotonic() > end_s:
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
