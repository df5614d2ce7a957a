"""Runs in kvdir's own environment, which has no Helm: says what daemons make of settings that the chart rendered.

stdin: a list of {"daemon": "coordinator" or "agent", "toml", "environ", "files": path to text}; paths in them are taken to lie
below DIRECTORY, where certificates are. stdout: for each a list of faults.

    python tests/helm/daemons.py DIRECTORY < settings.json
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from kvdir.config import load
from kvdir.errors import ConfigError
from kvdir.server.config import CoordinatorConfig
from kvdir.testing.certificates import make_certificates
from peer_agent.server.config import AgentConfig
from peer_agent.server.namespaces import read_namespaces

DAEMONS: dict[str, tuple[type, str]] = {"coordinator": (CoordinatorConfig, "KVDIR_"), "agent": (AgentConfig, "PEER_AGENT_")}
PLACES = ("/etc/kvdir", "/run/kvdir", "/var/lib/kvdir", "/dev/shm")


def main() -> None:
    root = Path(sys.argv[1])
    for place in PLACES:
        (root / place.lstrip("/")).mkdir(parents=True)
    made = make_certificates(root / "made")
    certificate = made.files("agent-a")
    (root / "etc/kvdir/tls").mkdir()
    for path, name in zip(
        (certificate.certificate, certificate.key, certificate.ca), ("tls.crt", "tls.key", "ca.crt"), strict=True
    ):
        shutil.copy(path, root / "etc/kvdir/tls" / name)
    json.dump([faults(root, item) for item in json.load(sys.stdin)], sys.stdout)


def faults(root: Path, item: dict[str, Any]) -> list[str]:
    cls, prefix = DAEMONS[item["daemon"]]
    for name, text in item["files"].items():
        path = root / name.lstrip("/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    toml = item["toml"]
    for place in PLACES:
        toml = toml.replace(f'"{place}', f'"{root}{place}').replace(f":{place}", f":{root}{place}")
    file = root / "settings.toml"
    file.write_text(toml)
    environ = {name: f"{root}{text}" if text.startswith(PLACES) else text for name, text in item["environ"].items()}
    try:
        config, _ = load(cls, prefix=prefix, file=file, environ=environ)
        if isinstance(config, AgentConfig):
            read_namespaces(config.namespaces)
    except ConfigError as error:
        return list(error.faults)
    return []


if __name__ == "__main__":
    main()
