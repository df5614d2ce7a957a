"""A whole cluster in one thread: the real publisher, services, cores and index on simulated time and a simulated, faulty network."""
