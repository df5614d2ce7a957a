"""The policy file of a daemon: read at start, and again when it or a salt file it names changes. The last good one stays.

A change is seen by the files' inode, size and time of writing, which also tells of a Kubernetes volume that was swapped below a
symbolic link. Reading blocks; `keep` does it in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

from kvdir.core.policy import Policy
from kvdir.core.policy_parse import parse_policy
from kvdir.errors import ConfigError
from kvdir.namespace import salt_digest
from kvdir.obs.logs import say

RELOAD_S = 1.0
"""A right that was taken away is gone after this long at most, and a turn of the loop."""

log = logging.getLogger("kvdir.policy")

_Signature = tuple[tuple[int, ...], ...]


class PolicyFile:
    """`policy`: the one in force. `fault`: why the newest file is not it, in words; empty when it is."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError with every fault."""
        self.path = path
        self.fault = ""
        self.reloads = 0
        self.refused_reloads = 0
        self._files: list[Path] = [path]
        self.policy = read_policy(path, self._files)
        self._seen = self._signature()

    def refresh(self) -> bool:
        """Looks at the files; True when another policy is in force now. Blocks."""
        if self._signature() == self._seen:
            return False
        files = [self.path]
        try:
            policy = read_policy(self.path, files)
        except ConfigError as error:
            self.fault = "; ".join(error.faults)
            self.refused_reloads += 1
            say(log, logging.ERROR, "policy not taken", file=self.path, reason=self.fault)
            return False
        finally:
            self._files = files
            self._seen = self._signature()
        self.reloads += 1
        changed, self.policy, self.fault = policy != self.policy, policy, ""
        say(log, logging.INFO, "policy read", file=self.path, identities=len(policy.entries or ()), changed=changed)
        return changed

    async def keep(self, changed: Callable[[], None]) -> None:
        """For ever. changed: called on the loop when another policy is in force."""
        while True:
            await asyncio.sleep(RELOAD_S)
            if await asyncio.to_thread(self.refresh):
                changed()

    def _signature(self) -> _Signature:
        return tuple(map(_look, self._files))


def read_policy(path: Path, files: list[Path]) -> Policy:
    """The policy in the file. files: gets every salt file that it names added; relative ones are beside it. Raises ConfigError
    with every fault.
    """

    def digest(name: str) -> str:
        files.append(path.parent / name)
        return digest_of_file(files[-1])

    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError([f"policy: {path}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"policy: {path}: not valid TOML: {error}"]) from error
    try:
        return parse_policy(document, salt_digest_of=digest)
    except ConfigError as error:
        raise ConfigError([f"policy: {fault}" for fault in error.faults]) from error


def digest_of_file(path: Path) -> str:
    """Of the salt in a file, without white space around it, as agents read it. Raises ValueError, without the salt."""
    try:
        salt = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    return salt_digest(salt.strip())


def _look(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
