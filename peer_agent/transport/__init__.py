"""Data planes: how verified bytes get from an owner's arena into ours.

    base.py      the port: ReadList, ReadStatus, Transport; everything above it is plane-blind
    registry.py  names of the planes, and how each is made
    shm.py       same host: the peer's arena mapped read-only, native copy, generation checked before and after
    tcp.py       framed reads on connections of their own; the wire carries lock, slot and generation, never an address
    movers.py    how coroutines wait for the native threads that move the bytes
    outcomes.py  statuses -> ReadOutcome

For tests, ours and third parties': fake.py (in-process plane with faults on demand), check.py and check_rig.py (the contract
suite), faulty_owner.py (a tcp owner that misbehaves).

docs/transports.md says which is used when and what is safe.
"""
