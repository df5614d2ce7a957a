"""Files beside the chart: images and compose. There is no Docker here; deploy/check_image.sh builds and runs the image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import ROOT

pytestmark = [pytest.mark.helm, pytest.mark.timeout(300)]

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAMS = {"kvdir": "kvdir", "peer-agent": "peer_agent"}
OURS = [name for name, service in SERVICES.items() if service.get("command", [""])[0] in PROGRAMS]


@pytest.mark.parametrize("file", ["Containerfile", "Containerfile.vllm"])
def test_hadolint_finds_nothing_when_it_reads(file: str) -> None:
    program = Path(sys.executable).with_name("hadolint")
    run = subprocess.run([program, DEPLOY / file], capture_output=True, text=True, timeout=150, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stdout


def test_everything_the_build_copies_is_let_through_when_it_is_ignored_by_default() -> None:
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} <= let_through
    assert os.readlink(ROOT / ".dockerignore") == ".containerignore"


@pytest.mark.parametrize("name", OURS)
def test_a_daemon_takes_its_command_when_compose_starts_it(name: str) -> None:
    program, *arguments = SERVICES[name]["command"]
    command = [os.environ["DAEMONS_PYTHON"], "-m", PROGRAMS[program], *arguments, "--print-config"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", list(SERVICES))
def test_a_service_is_pinned_bounded_and_local_when_it_runs(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[a-z0-9./-]+:v?[0-9]+\.[0-9]+\.[0-9]+(-[a-z]+)?", service["image"])
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), "plaintext: for this machine only"
    for volume in service.get("volumes", ()):
        source, _, mode = volume.split(":")
        assert (DEPLOY / source).exists(), source
        assert mode == "ro"
    for other in service.get("depends_on", ()):
        assert other in SERVICES
    if name in OURS:
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


def test_prometheus_scrapes_the_services_when_compose_runs() -> None:
    config = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())
    targets = [target for job in config["scrape_configs"] for static in job["static_configs"] for target in static["targets"]]
    listening = {
        f"{name}:{flag.rpartition(':')[2]}"
        for name in OURS
        for flag in SERVICES[name]["command"]
        if flag.startswith("--http-listen")
    }
    assert set(targets) == listening
