"""What the dashboards' queries have in common: whose series they read, rates, ratios, quantiles, names of nodes, variables.

Scopes are matchers. `cluster` and `namespace` are labels that the scraper adds (Kubernetes, external labels); where it adds
none, All matches. A series of an agent says which process it is from (instance), and peer_agent_build_info which node that is.
"""

from __future__ import annotations

from deploy.monitoring.grafana import Variable

FLEET = 'cluster=~"$cluster", namespace=~"$namespace"'
COORDINATOR = f'{FLEET}, instance=~"$coordinator"'
AGENT = f'{FLEET}, instance=~"$agent"'
"""The agents of the nodes chosen; `agent` is a hidden variable that follows `node`."""
SAME_PROCESS = "on (cluster, namespace, job, instance)"

_BUILT = f'peer_agent_build_info{{{FLEET}, node=~"$node"}}'
CLUSTER = Variable("cluster", "Cluster", "label_values(kvdir_build_info, cluster)")
NAMESPACE = Variable("namespace", "Namespace", 'label_values(kvdir_build_info{cluster=~"$cluster"}, namespace)')
COORDINATORS = Variable("coordinator", "Coordinator", f"label_values(kvdir_build_info{{{FLEET}}}, instance)")
NODES = Variable("node", "Node", f"label_values(peer_agent_build_info{{{FLEET}}}, node)")
AGENTS = Variable("agent", "", f"label_values({_BUILT}, instance)", hidden=True)


def rate(metric: str, scope: str, *, by: str = "", where: str = "") -> str:
    """A second, summed; where: more matchers."""
    return f"sum{_by(by)} (rate({metric}{{{_and(scope, where)}}}[$__rate_interval]))"


def of_one(metric: str, scope: str, *, by: str = "", where: str = "") -> str:
    """A second, at the coordinator that counts most: agents tell all coordinators the same, so a sum would count it twice."""
    each = rate(metric, scope, by=", ".join(filter(None, ("instance", by))), where=where)
    return f"max{_by(by)} ({each})"


def total(metric: str, scope: str, *, by: str = "", where: str = "", over: str = "sum") -> str:
    """A gauge, summed, or by another aggregation."""
    return f"{over}{_by(by)} ({metric}{{{_and(scope, where)}}})"


def share(part: str, whole: str) -> str:
    """Nothing while the whole is 0."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, histogram: str, scope: str, *, by: str = "", where: str = "") -> str:
    """Of a histogram, given without _bucket."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', scope, by=labels, where=where)})"


def mean(metric: str, scope: str, *, by: str = "") -> str:
    """Of a histogram, or of anything with _sum and _count, given without suffix."""
    return share(rate(f"{metric}_sum", scope, by=by), rate(f"{metric}_count", scope, by=by))


def per_node(expression: str) -> str:
    """An expression over series of agents, summed by the name of the node instead of the process."""
    return f"sum by (node) ({expression} * {SAME_PROCESS} group_left (node) peer_agent_build_info)"


def node_rate(metric: str, scope: str, *, where: str = "") -> str:
    """A second and node."""
    return per_node(f"rate({metric}{{{_and(scope, where)}}}[$__rate_interval])")


def node_total(metric: str, scope: str, *, where: str = "") -> str:
    """A gauge by node, summed over what else it is labelled with."""
    return per_node(f"{metric}{{{_and(scope, where)}}}")


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _and(scope: str, where: str) -> str:
    return f"{scope}, {where}" if where else scope
