"""How engines are written down, and where their own server says that their events are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdir.client import engine_sources
from kvdir.client.engine_options import at_rank, parse_engine, read_engines
from kvdir.client.engine_sources import discover, written
from kvdir.errors import InvalidInput, RemoteProtocolError, Unavailable, Unsupported


def test_engines_are_named_by_dialect_and_number_when_nobody_names_them():
    engines, faults = read_engines(["vllm=tcp://h:1,model=m,vllm=tcp://h:2,model=m", "sglang=tcp://h:3,model=m"])
    assert not faults
    assert [engine.name for engine in engines] == ["vllm-0", "vllm-1", "sglang-0"]
    assert [engine.hash_scheme for engine in engines] == ["vllm:sha256", "vllm:sha256", "sglang:sha256"]


def test_ranks_have_the_ports_that_follow():
    sources = written(parse_engine("vllm=tcp://h:5557,replay=tcp://h:6557,model=m,ranks=3"))
    assert [(source.rank, source.endpoint, source.replay) for source in sources] == [
        (rank, f"tcp://h:{5557 + rank}", f"tcp://h:{6557 + rank}") for rank in range(3)
    ]
    assert at_rank("ipc:///x", 2) == "ipc:///x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model=m", "comes before any engine"),
        ("vllm=tcp://h:1,model=m,model=n", "model is given twice"),
        ("vllm=tcp://h:1", "model= is required"),
        ("vllm=tcp://h:99999,model=m", "is none of tcp://HOST:PORT"),
        ("vllm=tcp://h:65535,model=m,ranks=2", "is none of tcp://HOST:PORT"),
        ("vllm=tcp://h:5557,replay=tcp://h:5558,model=m,ranks=2", "tcp://h:5558 would be for events and for a replay"),
        ("vllm=tcp://h:1,model=m,ranks=3,vllm=tcp://h:3,model=m", "'vllm-0' listens to tcp://h:3 already"),
        ("vllm=tcp://*:5557,model=m", "write its address"),
        ("vllm=ipc:///x,model=m,ranks=2", "several ranks need tcp"),
        ("vllm=tcp://h:1,model=m,ranks=2,rank=1", "give one of them"),
        ("vllm=tcp://h:1,model=m,name=a/b", "must be letters"),
        ("vllm=tcp://h:1,model=m,hash=md5", "hash=md5"),
        ("vllm=tcp://h:1,model=m,quiet_s=-1", "positive number"),
        ("vllm=tcp://h:1,model=m,salted=maybe", "must be required or any"),
        ("vllm=http://h:1,replay=tcp://h:2", "the engine itself says"),
        ("sglang=http://h:1,model=m", "no server that says where its events are"),
        ("vllm=tcp://h:1,model=m,vllm=tcp://h:1,model=m,name=b", "listens to tcp://h:1 already"),
        ("vllm=tcp://h:1,model=m,name=a,vllm=tcp://h:2,model=m,name=a", "another engine is called 'a'"),
        ("vllm", "is not KEY=VALUE"),
    ],
)
def test_fault_says_what_to_write(text: str, words: str):
    with pytest.raises(InvalidInput, match=words.replace("*", r"\*")):
        parse_engine(text)


def _answers(monkeypatch: pytest.MonkeyPatch, sources: object, models: object = None) -> None:
    said = {"/kv_event_sources": sources, "/v1/models": models or {"data": [{"id": "m"}]}}
    monkeypatch.setattr(engine_sources, "_get", lambda url, timeout_s: said[url.removeprefix("http://10.0.0.5:8000")])


ENGINE = parse_engine("vllm=http://10.0.0.5:8000")


def _rank(endpoint: str, **more: object) -> dict[str, object]:
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": None} | more


@pytest.mark.parametrize(
    ("said", "endpoint", "bind"),
    [
        ("tcp://*:5557", "tcp://10.0.0.5:5557", False),
        ("tcp://10.0.0.9:40001", "tcp://10.0.0.9:40001", False),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", True),
        ("ipc:///run/events", "ipc:///run/events", False),
    ],
)
def test_endpoint_is_taken_as_it_is_reached_from_here(monkeypatch: pytest.MonkeyPatch, said: str, endpoint: str, bind: bool):
    _answers(monkeypatch, {"0": _rank(said)})
    (source,) = discover(ENGINE)
    assert (source.rank, source.endpoint, source.bind, source.model) == (None, endpoint, bind, "m")


@pytest.mark.parametrize(
    ("sources", "error", "words"),
    [
        ({}, Unsupported, "publishes no events"),
        ({"0": _rank("tcp://*:1", publisher="null")}, Unsupported, "no events over ZMQ"),
        ({"0": 7}, RemoteProtocolError, "not described as vLLM does it"),
        ([], RemoteProtocolError, "is this vLLM's server"),
        ({"\N{SUPERSCRIPT TWO}": _rank("tcp://*:1")}, RemoteProtocolError, "not described as vLLM does it"),
        ({"9" * 5000: _rank("tcp://*:1")}, RemoteProtocolError, "not described as vLLM does it"),
        ({"0": _rank("tcp://*:1", replay_endpoint=7)}, RemoteProtocolError, "not described as vLLM does it"),
        ({str(rank): _rank(f"tcp://*:{rank}") for rank in range(2000)}, RemoteProtocolError, "2000 ranks, at most 1024"),
        ({"0": _rank("tcp://*:1"), "1": _rank("tcp://*:1")}, RemoteProtocolError, "two ranks of this engine have one endpoint"),
    ],
)
def test_answer_that_is_of_no_use_says_why(
    monkeypatch: pytest.MonkeyPatch, sources: object, error: type[Exception], words: str
):
    _answers(monkeypatch, sources)
    with pytest.raises(error, match=words):
        discover(ENGINE)


def test_rank_that_the_engine_has_not_is_refused(monkeypatch: pytest.MonkeyPatch):
    _answers(monkeypatch, {"0": _rank("tcp://*:1"), "1": _rank("tcp://*:2")})
    assert [source.rank for source in discover(replace(ENGINE, rank=1))] == [1]
    with pytest.raises(Unsupported, match="has no rank 3, but 0, 1"):
        discover(replace(ENGINE, rank=3))


def test_server_that_drips_costs_no_more_than_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch):
    class Dripping:
        def __enter__(self):
            return self

        def __exit__(self, *_: object):
            pass

        def read1(self, _: int) -> bytes:
            return b" "

    monkeypatch.setattr(engine_sources.urllib.request, "urlopen", lambda url, timeout: Dripping())
    with pytest.raises(Unavailable, match="no whole answer in time"):
        discover(ENGINE, timeout_s=0.05)


def test_nobody_at_the_server_is_unavailable():
    with pytest.raises(Unavailable, match="nobody answers"):
        discover(parse_engine("vllm=http://127.0.0.1:9"), timeout_s=0.5)
