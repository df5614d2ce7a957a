"""The pure core: streams, trust, the directory, the owner's outbox. No clock, I/O, randomness, asyncio or logging.

Time comes in as `now_s` (monotonic seconds), effects come out as values (effects.py). ARCHITECTURE.md has the map.
"""
