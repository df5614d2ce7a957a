"""What a node says of its own reads: bounded where it is counted, equal after it travelled."""

from __future__ import annotations

from dataclasses import replace

from kvdir.core.event import MAX_SOURCE_NAME, Heartbeat, HeartbeatFigures, ReadFigures, ReadSource
from kvdir.rpc.event_codec import decode_heartbeat, decode_reads, encode_heartbeat, encode_reads
from peer_agent.core.effects import LoadStatus
from peer_agent.core.read_sources import ReadSources
from peer_agent.server.load import ReaderCounters


def test_the_peers_that_gave_most_are_named_most_first() -> None:
    sources = ReadSources()
    for node, blocks in (("a", 1), ("b", 5), ("c", 2), ("a", 3)):
        sources.add(node, blocks=blocks, bytes=10 * blocks)
    assert sources.most(2) == (ReadSource("b", 5, 50), ReadSource("a", 4, 40))


def test_a_newcomer_takes_the_place_of_the_peer_that_gave_least_when_the_table_is_full() -> None:
    sources = ReadSources(max_peers=2)
    for node, size in (("a", 30), ("b", 20), ("c", 10)):
        sources.add(node, blocks=1, bytes=size)
    assert [source.node for source in sources.most(9)] == ["a", "c"]


def test_every_result_of_a_load_has_its_figure() -> None:
    counters = ReaderCounters()
    for number, status in enumerate(LoadStatus, 1):
        counters.blocks[status] = number
    figures = counters.figures()
    assert [getattr(figures, status.name.lower()) for status in LoadStatus] == [1, 2, 3, 4, 5, 6, 7]


def test_reads_are_equal_after_they_travelled_in_a_heartbeat() -> None:
    reads = ReadFigures(1, 2, 3, 4, 5, 6, 7, 800, (ReadSource("n1", 2, 800),))
    for figures in (HeartbeatFigures(reads=reads), HeartbeatFigures()):
        message = encode_heartbeat(9, Heartbeat(5, figures)).heartbeat
        assert decode_heartbeat(message).figures.reads == figures.reads


def test_only_so_many_sources_are_believed_as_a_heartbeat_may_name() -> None:
    many = tuple(ReadSource(f"n{number}", 1, 1) for number in range(100))
    assert decode_reads(encode_reads(replace(ReadFigures(), sources=many))).sources == many[:8]


def test_a_peer_whose_name_is_no_name_is_not_told_of() -> None:
    sources = (ReadSource("a" * MAX_SOURCE_NAME, 1, 1), ReadSource("b" * (MAX_SOURCE_NAME + 1), 1, 1))
    assert decode_reads(encode_reads(ReadFigures(sources=sources))).sources == sources[:1]
