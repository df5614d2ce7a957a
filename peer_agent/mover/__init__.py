"""The mover: a supervised child process for libraries that may crash, hang, or read and write what they should not.

    backend.py    the port: what runs inside (Backend: one-sided gets; Service: other calls), and what it may touch
    backends.py   names of the backends, and how the mover finds them
    messages.py   what agent and mover tell each other over one socketpair
    main.py       inside: the loop of the mover; `python -m peer_agent.mover`
    reads.py      inside: payloads, then headers, then verification; late reads until nothing writes any more
    process.py   outside: start, watch, restart
    child.py     outside: one process until it has been reaped, and what was asked of it
    contain.py    what the mover is denied: environment, lifetime beyond the agent, priority in a memory shortage
    fake.py       a backend without a library, with faults on demand
    ucx.py        libucp: gets over RDMA (libucp.py finds it, lanes.py says which paths are allowed, csrc/ binds it)
    nixl.py       the same through NIXL (nixl_agent.py: its bindings, nixl_lists.py: prepared lists)
    device.py     the service that copies blocks of tier gpu into the arena (device_calls.py: what it is asked)

The plane on top is peer_agent/transport/mover.py. Why a process of its own: docs/adr/0008.
Nothing in here imports grpc, and only device.py and nixl*.py numpy: a mover starts in a tenth of a second and holds what it
needs.
"""
