"""Labels of metrics with what bounds them, and the buckets of histograms. What uses them: definitions.py."""

from __future__ import annotations

from kvdir.core.repair import Ask
from kvdir.core.views import ViewScope
from kvdir.location import StreamState
from kvdir.obs.definition import Label

MAX_NODES = 512
"""Nodes with series of their own at a coordinator; in larger fleets those in trouble come first, the rest is `other`."""

CALL_BUCKETS_S = tuple(50e-6 * 2**step for step in range(15))
"""50 us to 0.8 s, each twice the one before: a quantile is off by a factor of two at most."""
TRANSFER_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
AGE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RATIO_BUCKETS = (0.25, 0.5, 0.71, 0.87, 1.0, 1.15, 1.41, 2.0, 4.0, 8.0, 16.0)
"""About symmetric around a right prediction."""

# of both daemons

METHOD = Label("method", bound=32, why="methods that the server has")
AGENT_METHOD = Label("method", bound=24, why="methods that the agent has")
CODE = Label("code", bound=17, why="codes of gRPC")
REASON = Label("reason", bound=16, why="reasons in the code")
BUILD = tuple(Label(name, bound=1, why="this process") for name in ("version", "python", "protocol"))
OWN_NODE = Label("node", bound=1, why="this agent")
"""By way of build_info: a join on the process gives every other series of an agent the name of its node."""
SPAN = Label("outcome", ("exported", "dropped", "failed"))
PORT = Label("port", bound=2, why="grpc and data, where TLS is on")
RELOAD = Label("outcome", ("used", "refused"))
REFUSAL = Label("reason", ("no_identity", "role", "node", "tenant", "capability"))
LIMIT = Label("limit", ("rate", "streams", "watchers", "connections"))
AUDITED = Label("outcome", ("done", "refused", "failed"))

# of coordinators

NODE = Label("node", bound=MAX_NODES, why="nodes, those in trouble first", comes_and_goes=True)
STATE = Label("state", tuple(state.name.lower() for state in StreamState))
REPAIR = Label("kind", tuple(ask.value for ask in Ask))
REPAIRED = Label("outcome", ("asked", "done", "failed"))
SCOPE = Label("scope", tuple(scope.name.lower() for scope in ViewScope))
TRUSTED = Label("trusted", ("true", "false"))
SUBJECT = Label("subject", bound=64, why="configured quotas")
VERDICT = Label("verdict", ("within", "untrusted", "settling", "dry-run", "evicting"))
FATE = Label("fate", ("forgotten", "spared"))

# of agents

# Not `namespace`: Kubernetes' scrapers add a label of that name, and Prometheus would rename ours to exported_namespace.
NAMESPACE = Label("kv_namespace", bound=32, why="namespaces that the agent serves")
SLOT = Label("state", ("free", "reserved", "committed", "retired", "quarantined"))
GUARD = Label("by", ("lock", "pin"))
ACCEPTED = Label("state", ("accepted", "room"))
STAGED = Label("outcome", ("staged", "overwritten", "late", "failed"))
STATUS = Label("status", ("miss", "hit_local", "hit_peer", "stale", "corrupt", "late", "skipped"))
PRIORITY = Label("priority", ("load", "prefetch", "replication"))
SOURCE = Label("source", ("local", "peer"))
METADATA = Label("kind", ("lookup", "lock", "unlock", "report"))
ANSWER = Label("answer", ("held", "stale"))
PREFETCH = Label("outcome", ("brought", "used", "unused"))
UNUSED = Label("why", ("hedged", "late", "prefetched"))
PLANE = Label("plane", bound=6, why="data planes of the build")
LANE = Label("lane", bound=12, why="lanes of the transport libraries")
TRANSPORT = Label("transport", bound=12, why="transports of the libraries")
SERVING_FAULT = Label("reason", ("refused", "torn", "protocol_errors", "connections_refused"))
HANDSHAKE = Label("outcome", ("handshakes", "not_tls", "no_certificate", "untrusted", "refused_us", "broken", "unfinished"))
CAPABILITY = Label("reason", ("malformed", "epoch", "expired", "ended", "forged", "uncovered"))
"""What was wrong with the capability of a read (csrc/tcp_server.hpp Refusal); uncovered: blocks that it does not cover."""
COORDINATOR = Label("coordinator", bound=8, why="coordinators published to", comes_and_goes=True)
NOMINATOR = Label("source", ("replica", "coordinator", "none"))
STREAM = Label("stream", bound=12, why="engines followed", comes_and_goes=True)
FINDING = Label("kind", bound=12, why="kinds in the code")
