"""Arena files: one owner, complete or absent, refused with words when they cannot be had."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvdir.errors import NoSpace
from peer_agent import _native
from peer_agent.memory.arena import Arena, ArenaError, ArenaTooLarge
from peer_agent.memory.layout import SUPERBLOCK_BYTES, SizeClass

CLASSES = [SizeClass(b"a" * 32, 1000, 4), SizeClass(b"b" * 32, 4096, 3)]


def test_arena_has_its_classes_and_mode_when_created(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with Arena.create(path, CLASSES, epoch=5, prefault=True) as arena:
        assert [c.slots for c in arena.classes] == [4, 3]
        assert arena.classes[0].first == SUPERBLOCK_BYTES
        assert arena.classes[1].first == arena.classes[0].end
        assert len(arena.region) == arena.arena_bytes == arena.classes[1].end
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_blocks * 512 >= arena.arena_bytes, "memory is there before anybody writes"
        assert len(arena.arena_id) == 16
        assert arena.epoch_now() == 5
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_reader_sees_the_same_bytes_when_it_opens(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "arena", CLASSES, epoch=5) as owner:
        with Arena.open(owner.path, writable=False) as reader, Arena.open(owner.path, writable=True) as engine:
            assert (reader.arena_id, reader.epoch, reader.classes) == (owner.arena_id, 5, owner.classes)
            assert reader.file_identity == owner.file_identity
            engine.region[-1] = 7
            assert reader.region[-1] == owner.region[-1] == 7
            with pytest.raises(TypeError, match="read-only"):
                reader.region[-1] = 8
        assert os.path.exists(owner.path), "only the owner unlinks"


def test_second_owner_is_refused_with_the_pid_when_the_first_lives(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with Arena.create(path, CLASSES, epoch=5) as first:
        with pytest.raises(ArenaError, match=rf"in use by the agent with pid {os.getpid()}; stop it"):
            Arena.create(path, CLASSES, epoch=6)
        assert first.epoch_now() == 5, "the refusal changed nothing"
        assert Arena.open(path, writable=False).epoch == 5


def test_dead_owner_is_replaced_and_marked_when_its_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    _die_with_an_arena(path)
    with Arena.open(path, writable=False) as old:
        assert old.epoch_now() == 111
        with Arena.create(path, CLASSES, epoch=222) as new:
            assert old.epoch_now() == 0, "who still maps the old file sees that it is over"
            assert new.arena_id != old.arena_id
            assert Arena.open(path, writable=False).epoch == 222
    assert list(tmp_path.iterdir()) == []


def _die_with_an_arena(path: Path, *, added_later: bool = False) -> None:
    """A process that creates an arena of epoch 111 and is killed before it can close it."""
    create = "arena = Arena.create(sys.argv[1], [size_class], epoch=111)\n"
    if added_later:
        create = "arena = Arena.create(sys.argv[1], [], epoch=111, spare_bytes=8192)\narena.add_class(size_class)\n"
    program = (
        "import os, signal, sys\n"
        "from peer_agent.memory.arena import Arena\n"
        "from peer_agent.memory.layout import SizeClass\n"
        f"size_class = SizeClass(b'a' * 32, 1000, 4)\n{create}"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2], timeout=30)
    assert ended.returncode == -9


def test_dead_owners_slots_are_written_once_when_its_successor_failed_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory has been given back: to write them again would take as many pages, and SIGBUS where there are none."""
    path = tmp_path / "arena"
    _die_with_an_arena(path)
    written: list[bytes] = []
    monkeypatch.setattr(_native, "begin_write", lambda region, offsets: written.append(offsets))
    for _ in range(2):
        with pytest.raises(ArenaTooLarge):
            Arena.create(path, [SizeClass(b"a" * 32, 1 << 30, 1 << 20)], epoch=5)
        assert len(written) == 1


def test_file_that_is_no_arena_is_left_alone_when_it_stands_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"somebody's data" * 1000)
    with pytest.raises(ArenaError, match="is no arena"):
        Arena.create(path, CLASSES, epoch=5)
    assert path.read_bytes() == b"somebody's data" * 1000


def test_arena_that_does_not_fit_says_how_much_is_free(tmp_path: Path) -> None:
    with pytest.raises(ArenaTooLarge, match=r"[\d,]+ bytes does not fit: [\d,]+ bytes are free in ") as caught:
        Arena.create(tmp_path / "arena", [SizeClass(b"a" * 32, 1 << 30, 1 << 20)], epoch=5)
    assert isinstance(caught.value, NoSpace)
    assert "--shm-size" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_epoch_zero_is_refused_when_it_would_mean_closed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="epoch 0"):
        Arena.create(tmp_path / "arena", CLASSES, epoch=0)


def test_directory_that_does_not_exist_is_named_when_creating(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="nowhere"):
        Arena.create(tmp_path / "nowhere" / "arena", CLASSES, epoch=5)


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 5000])
def test_garbage_is_refused_when_opened(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    with pytest.raises(ArenaError, match="not an arena"):
        Arena.open(path, writable=False)
    with pytest.raises(ArenaError, match="No such file"):
        Arena.open(tmp_path / "missing", writable=False)


def test_truncated_and_closed_arenas_are_refused_when_opened(tmp_path: Path) -> None:
    path, copy = tmp_path / "arena", tmp_path / "copy"
    with Arena.create(path, CLASSES, epoch=5) as arena:
        content = bytes(arena.region)
        copy.write_bytes(content[:-1])
        with pytest.raises(ArenaError, match="shorter"):
            Arena.open(copy, writable=False)
        copy.write_bytes(content[:32] + bytes(8) + content[40:])
        with pytest.raises(ArenaError, match="its owner closed it"):
            Arena.open(copy, writable=False)


def test_close_is_safe_when_buffers_are_still_exported(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", CLASSES, epoch=5)
    server = _native.TcpServer(arena.region, 5, "127.0.0.1", 0)
    view = arena.region[-100:]
    arena.close()
    arena.close()
    assert bytes(view) == bytes(100)
    with pytest.raises(ValueError, match="is closed"):
        _ = arena.region
    server.close()


def test_owner_leaves_a_successor_alone_when_it_closes_late(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    first = Arena.create(path, CLASSES, epoch=5)
    os.unlink(path)
    with Arena.create(path, CLASSES, epoch=6):
        first.close()
        assert Arena.open(path, writable=False).epoch == 6


@pytest.mark.parametrize("added_later", [False, True])
def test_memory_of_a_dead_owner_is_free_before_the_new_arena_is_made_although_somebody_maps_it(
    tmp_path: Path, added_later: bool
) -> None:
    """Or an arena of more than half the memory could not be restarted."""
    path = tmp_path / "arena"
    _die_with_an_arena(path, added_later=added_later)
    with Arena.open(path, writable=True) as old:
        first = old.classes[0].first.to_bytes(8, "little")
        _native.begin_write(old.region, first)
        old.region[old.classes[0].first + 128 : old.classes[0].end] = b"x" * (old.classes[0].end - old.classes[0].first - 128)
        record = _native.commit(old.region, first, b"a" * 32, bytes(32), 32, 1000, None)
        before = os.fstat(old.fd).st_blocks
        with Arena.create(path, CLASSES, epoch=6):
            assert os.fstat(old.fd).st_blocks * 512 <= 2 * SUPERBLOCK_BYTES < before * 512
            into = bytearray(1000)
            address = _address(into).to_bytes(8, "little")
            status = _native.read_blocks(old.region, record, b"a" * 32, bytes(32), 32, address, False)
            assert status != b"\0", "zeros are nobody's block"


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_open_returns_when_the_path_is_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "arena")  # who opens one to read waits for a writer
    with pytest.raises(ArenaError, match="cannot use arena"):
        Arena.open(tmp_path / "arena", writable=False)
