"""`kvdir doctor`: asks coordinators what they believe, tries the addresses of agents, and says what is wrong and how to fix it.

The checks are pure (kvdir/diagnosis); here facts are gathered, each wait with a deadline, and findings shown. It reads only.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvdir.cli.output import CommandFailed, emit, output_option, table
from kvdir.cli.tls import tls_options
from kvdir.diagnosis.finding import Finding, Verdict, ranked, worst
from kvdir.errors import InvalidInput, KvdirError

if TYPE_CHECKING:
    from kvdir.core.views import NodeView
    from kvdir.diagnosis.cluster import ClusterFacts, CoordinatorFacts
    from kvdir.rpc.certificates import TlsFiles

MAX_STORIES = 64
"""Nodes whose story is asked for."""

MAX_ADDRESSES = 256
STORY_ENTRIES = 256
THREADS = 16


@click.command()
@click.argument("coordinators", nargs=-1, metavar="[COORDINATOR...]")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0.01),
    default=2.0,
    show_default=True,
    help="Longest wait for each answer and each connection.",
)
@click.option("--reach/--no-reach", default=True, help="Try to connect to every agent's address, from here.")
@tls_options
@output_option
def doctor(coordinators: tuple[str, ...], timeout_s: float, reach: bool, tls: TlsFiles | None, output: str) -> None:
    """Why nothing hits: checks of the cluster, each with what was seen, what it means, and the fix.

    Exit code 1 if a check finds a fault; warnings may be as intended. `peer-agent doctor` checks one node. See docs/doctor.md.

    \b
    Examples:
      kvdir doctor                                    the coordinator of this host
      kvdir doctor 10.0.0.1:7400 10.0.0.2:7400
      kvdir doctor dns:///kvdir.prod.svc:7400         all that the name stands for
      kvdir doctor --output json | jq '.findings[] | select(.verdict != "ok")'
    """
    from kvdir.diagnosis.cluster import examine

    facts = gather(coordinators or ("127.0.0.1:7400",), timeout_s=timeout_s, reach=reach, tls=tls)
    show(examine(facts), output=output)


def show(findings: Sequence[Finding], *, output: str) -> None:
    """Prints findings, the worst first. Raises CommandFailed when there is a fault."""
    shown = ranked(findings)
    document = {
        "verdict": worst(shown).value,
        "counts": {verdict.value: sum(item.verdict is verdict for item in shown) for verdict in Verdict},
        "findings": [asdict(item) | {"verdict": item.verdict.value} for item in shown],
    }
    emit(document, lambda: _view(shown), output=output)
    faults = [item for item in shown if item.verdict is Verdict.FAULT]
    if faults:
        checks = dict.fromkeys(item.check for item in faults)
        raise CommandFailed(f"faults found: {len(faults)} ({', '.join(checks)})", slug="faults")


def _view(findings: Iterable[Finding]) -> object:
    rows = [(item.verdict.value, item.check, item.subject, item.seen, _advice(item)) for item in findings]
    return table(["", "check", "about", "seen", "what it means, and the fix"], rows)


def _advice(finding: Finding) -> str:
    """Two sentences, or nothing."""
    told = (f"{text[0].upper()}{text[1:]}" for text in (finding.meaning, finding.fix) if text)
    return " ".join(text if text.endswith("?") else f"{text}." for text in told)


# -- gathering -------------------------------------------------------------------------------------------------------------


def gather(coordinators: Sequence[str], *, timeout_s: float, reach: bool, tls: TlsFiles | None = None) -> ClusterFacts:
    """Asks every coordinator that these names stand for. Nothing raises: what does not answer is a fact.

    Addresses of agents are tried from this machine, once each.
    """
    from kvdir.client.discovery import Discovery
    from kvdir.diagnosis.cluster import ClusterFacts, CoordinatorFacts

    try:
        with Discovery(coordinators) as discovery:
            names = discovery.wait_all(timeout_s)
            problem = discovery.problem
    except InvalidInput as error:
        names, problem = (), str(error)
    if not names:
        failed = CoordinatorFacts(address=", ".join(coordinators), failure=problem or "the name stands for no address")
        return ClusterFacts(coordinators=(failed,))
    with ThreadPoolExecutor(THREADS) as pool:
        told = tuple(pool.map(lambda name: _ask(name, timeout_s, tls), names))
        nodes = (view for facts in told for view in facts.nodes)
        addresses = dict.fromkeys(view.trust.peer_address for view in nodes if view.trust.peer_address)
        wanted = list(addresses)[:MAX_ADDRESSES] if reach else []
        reached = dict(zip(wanted, pool.map(lambda address: why_not_reached(address, timeout_s), wanted), strict=True))
    return ClusterFacts(coordinators=told, reached=reached)


def _ask(address: str, timeout_s: float, tls: TlsFiles | None) -> CoordinatorFacts:
    from kvdir.client.sync import Client
    from kvdir.diagnosis.cluster import CoordinatorFacts

    try:
        with Client(address, deadline_s=timeout_s, connect_timeout_s=min(1.0, timeout_s), stream=False, tls=tls) as client:
            status, nodes = client.status(), client.nodes()
            now_unix_ms = int(time.time() * 1000)
            lives = _lives(client, nodes)
    except KvdirError as error:
        return CoordinatorFacts(address=address, failure=str(error))
    return CoordinatorFacts(address=address, status=status, nodes=nodes, lives=lives, now_unix_ms=now_unix_ms)


def _lives(client: Any, nodes: Sequence[NodeView]) -> Mapping[str, int]:
    """How many epochs of each node were registered lately, as far as the coordinator's log goes. None, where it keeps none."""
    from kvdir.core.story import Kind

    epochs: dict[str, set[int]] = defaultdict(set)
    for view in nodes[:MAX_STORIES]:
        try:
            story = client.story(node=view.trust.node, max_entries=STORY_ENTRIES)
        except KvdirError:
            return {}  # a coordinator on a shared store has no log
        for entry in story.entries:
            if entry.kind in (Kind.REGISTERED, Kind.FENCED):
                epochs[view.trust.node].add(entry.epoch)
    return {node: len(seen) for node, seen in epochs.items()}


def why_not_reached(address: str, timeout_s: float) -> str:
    """Why no connection to "host:port" can be made, in words; empty when one can."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return ""
    except ValueError:
        return "that is not host:port"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
