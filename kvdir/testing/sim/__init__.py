"""A whole cluster in one thread: the real publisher, services, cores and index on simulated time and a faulty network.

loop, network, wire       simulated time, and what happens to messages
node, ledger, cluster     simulated nodes, the truth about them, LocalCluster
belief, invariants        what the coordinator says, and what it must not say
story, steps              courses of events as text, and what each step does
random_steps, histories   random courses, telling them, shrinking those that fail
"""
