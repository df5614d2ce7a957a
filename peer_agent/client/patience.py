"""How long the engine library waits, blocking and asyncio alike."""

DEADLINE_S = 1.0
"""Of calls that give none."""

LEASE_S = 2.0
"""Beyond the deadline: how long blocks stay locked when the release gets lost."""

GIVE_UP_S = 0.04
"""Beyond the deadline: for telling the agent that a store has given its slots up; what does not arrive costs their lease."""

ATTACH_PAUSE_S = 0.5
"""Between two tries to attach, so that a missing agent costs an engine next to nothing."""
