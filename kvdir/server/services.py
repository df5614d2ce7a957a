"""The services of a coordinator, by their descriptors, and what every server of it needs around them."""

from __future__ import annotations

import logging
from typing import Any

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from kvdir.obs.logs import say_bug
from kvdir.v1 import admin_pb2, directory_pb2, events_pb2

log = logging.getLogger("kvdir.rpc")

SERVICES: tuple[Any, ...] = (
    directory_pb2.DESCRIPTOR.services_by_name["Directory"],
    events_pb2.DESCRIPTOR.services_by_name["Events"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)
"""ServiceDescriptors."""

HEALTH_NAMES = ("", *(service.full_name for service in SERVICES))
"""What a health check may ask for; "" is the server as a whole."""

REFLECTED = (*HEALTH_NAMES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)


def log_bug(method: str, request_id: str, error: Exception) -> None:
    """An exception that is not ours: the caller was told no more than the request id."""
    say_bug(log, "call failed", error, method=method, request_id=request_id)
