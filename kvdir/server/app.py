"""Composition root: from a config to wired objects. The only place that chooses implementations."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import kvdir
from kvdir.core.directory import Directory
from kvdir.index import Sketch, open_index
from kvdir.obs.metrics import CoordinatorMetrics
from kvdir.obs.spans import NO_TRACER, Tracer
from kvdir.rpc.channel import server_options
from kvdir.rpc.interceptors import EdgeInterceptor
from kvdir.rpc.tls import bind
from kvdir.server.admin_service import AdminService
from kvdir.server.checkpoint import Checkpointer, CheckpointFigures, load
from kvdir.server.config import CoordinatorConfig
from kvdir.server.coordinator import Coordinator
from kvdir.server.directory_service import DirectoryService
from kvdir.server.events_service import EventsService
from kvdir.server.lookup_source import DirectorySource, LookupSource
from kvdir.server.lookup_stream import LookupStreams
from kvdir.server.score_source import DirectoryScores, ScoreSource
from kvdir.server.services import REFLECTED, log_bug
from kvdir.server.shared.admin_service import SharedAdminService
from kvdir.server.shared.coordinator import SharedCoordinator
from kvdir.server.shared.services import SharedDirectoryService, SharedEventsService, StoreScores, StoreSource
from kvdir.server.watch_service import add_watch
from kvdir.server.worker_place import WorkerPlace
from kvdir.store import make_store
from kvdir.store.base import BlockStore
from kvdir.v1 import admin_pb2_grpc, directory_pb2_grpc, events_pb2_grpc

AnyCoordinator = Coordinator | SharedCoordinator


def build_coordinator(config: CoordinatorConfig) -> Coordinator:
    """The directory with its index, nothing listening yet."""
    place = WorkerPlace() if config.lookup_workers else None
    try:
        return _build(config, place)
    except BaseException:
        if place is not None:
            place.close()
        raise


def _build(config: CoordinatorConfig, place: WorkerPlace | None) -> Coordinator:
    now_s, name = time.monotonic(), config.name or socket.gethostname()

    def make(seed: int, blocks: int = 0) -> Directory:
        new_index = open_index if place is None else place.new_region
        room = max(blocks, config.expected_blocks)
        index = new_index(expected_blocks=room, seed=seed, max_bytes=config.max_index_bytes)
        return Directory(index, Sketch, config.limits(), now_s=now_s)

    figures = CheckpointFigures()
    loaded = load(Path(config.checkpoint), make, figures, now_s=now_s) if config.checkpoint else None
    # A random seed keys the index's mixing function, so that nobody can aim fingerprints at one spot of the table.
    seed = loaded[1] if loaded else secrets.randbits(64)
    directory = loaded[0] if loaded else make(seed)
    coordinator = Coordinator(config, directory, CoordinatorMetrics(), name=name, version=kvdir.__version__, seed=seed)
    coordinator.checkpoints = figures
    if place is not None:
        coordinator.place = place
        place.keep_roster(coordinator)
    if config.checkpoint:
        coordinator.checkpointer = Checkpointer(Path(config.checkpoint), directory, figures, seed=seed, name=name)
    return coordinator


def build_shared(config: CoordinatorConfig, store: BlockStore | None = None) -> SharedCoordinator:
    """A coordinator on the store that the config names, or on this one; not opened yet."""
    name = config.name or socket.gethostname()
    return SharedCoordinator(config, store or make_store(config.store), name=name, version=kvdir.__version__)


def score_source(coordinator: AnyCoordinator) -> ScoreSource:
    """What scores are made of."""
    return StoreScores(coordinator) if isinstance(coordinator, SharedCoordinator) else DirectoryScores(coordinator)


def build_server(
    coordinator: AnyCoordinator, *, tracer: Tracer = NO_TRACER
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """The gRPC server with every service; the caller binds and starts it, on the loop that runs now."""
    config = coordinator.config
    server = grpc.aio.server(
        interceptors=[
            EdgeInterceptor(
                coordinator.metrics.calls,
                max_deadline_s=config.max_deadline_s,
                on_bug=log_bug,
                gate=coordinator.gate,
                tracer=tracer,
            )
        ],
        options=server_options(max_message_bytes=config.max_message_bytes, share_port=coordinator.place is not None),
    )
    source: LookupSource = (
        StoreSource(coordinator) if isinstance(coordinator, SharedCoordinator) else DirectorySource(coordinator)
    )
    streams = LookupStreams(
        source,
        coordinator.metrics.calls,
        max_streams=config.max_lookup_streams,
        max_deadline_s=config.max_deadline_s,
        on_bug=log_bug,
        tracer=tracer,
    )
    coordinator.on_drain.append(streams.drain)
    if coordinator.place is not None:
        bind(server, coordinator.place.socket, None)
    made = DirectoryService if isinstance(coordinator, Coordinator) else SharedDirectoryService
    service = made(source, streams, max_fingerprints=config.max_fingerprints, scores=score_source(coordinator))
    directory_pb2_grpc.add_DirectoryServicer_to_server(service, server)
    if isinstance(coordinator, SharedCoordinator):
        events_pb2_grpc.add_EventsServicer_to_server(SharedEventsService(coordinator), server)
        admin_pb2_grpc.add_AdminServicer_to_server(SharedAdminService(coordinator), server)
    else:
        add_watch(server, coordinator.watching, stall_s=config.watch_stall_s)
        events_pb2_grpc.add_EventsServicer_to_server(EventsService(coordinator), server)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(coordinator), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection(REFLECTED, server)
    return server, healthy
