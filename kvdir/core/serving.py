"""Who serves which model: the engines that requests can be sent to, as the streams of the directory tell. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvdir.core.instance import parse


class Serving(NamedTuple):
    """A live stream. models: those it has announced namespaces of. admitted: trusted as far as the caller asks for."""

    stream: str
    models: frozenset[str]
    admitted: bool = True


class Engine(NamedTuple):
    """One data-parallel rank of an engine."""

    stream: str
    admitted: bool


class Engines:
    """The engines among the live streams, by model and node. Building it costs a microsecond a stream; asking, nothing."""

    def __init__(self, streams: Iterable[Serving]) -> None:
        self._by_model: defaultdict[str, defaultdict[str, list[Engine]]] = defaultdict(lambda: defaultdict(list))
        for stream, models, admitted in streams:
            if "/" not in stream or not models:
                continue
            of = parse(stream)
            if of.engine:
                for model in models:
                    self._by_model[model][of.node].append(Engine(stream, admitted))

    def serving(self, models: frozenset[str]) -> Mapping[str, Sequence[Engine]]:
        """By node, those that have announced blocks of one of the models; an engine of several may come more than once."""
        found = [self._by_model[model] for model in models if model in self._by_model]
        if len(found) == 1:
            return found[0]
        merged: defaultdict[str, list[Engine]] = defaultdict(list)
        for by_node in found:
            for node, engines in by_node.items():
                merged[node] += engines
        return merged
