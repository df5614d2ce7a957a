"""Data planes: how verified bytes get from an owner's arena into ours.

    base.py   the port: ReadList, ReadStatus, Transport; everything above it is plane-blind
    shm.py    same host: the peer's arena mapped read-only, native copy, generation checked before and after
    tcp.py    framed reads on a connection of their own; the wire carries lock, slot and generation, never an address
    fake.py   in-process plane for tests, with faults on demand; passes the same contract suite

docs/transports.md says which is used when and what is safe.
"""
