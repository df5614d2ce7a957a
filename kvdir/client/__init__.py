"""Clients of the coordinator: `aio.DirectoryClient`, its sync twin, and the publisher that owners run."""
