"""What became of the blocks that engines asked for: one panel of several dashboards, with the same colours everywhere."""

from __future__ import annotations

from deploy.monitoring.boards.words import rate
from deploy.monitoring.grafana import Panel, Query

RESULTS = {
    "hit_local": ("here", "semi-dark-green"),
    "hit_peer": ("from another node", "semi-dark-blue"),
    "miss": ("nowhere", "#6e7681"),
    "skipped": ("not worth fetching", "#4a5058"),
    "stale": ("stale", "semi-dark-orange"),
    "late": ("late", "semi-dark-purple"),
    "corrupt": ("corrupt", "semi-dark-red"),
}


def result_of_blocks(scope: str, *, width: int) -> Panel:
    """Blocks a second by status, stacked: green and blue were found, the rest is recomputed."""
    return Panel(
        title="Blocks asked for a second, by where they were found", width=width, stacked=True,
        good="Green and blue: not recomputed. Grey is normal; orange, purple and red are thin lines at most.",
        queries=[
            Query(rate("peer_agent_load_blocks_total", scope, where=f'status="{status}"'), legend)
            for status, (legend, _) in RESULTS.items()
        ],
        colours=dict(RESULTS.values()),
    )  # fmt: skip
