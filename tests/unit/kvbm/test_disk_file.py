"""The disk tier's file: found again after a restart, refused if it is another's, and never believed without proof."""

import ctypes
import errno
import multiprocessing
import os
import signal
import stat
import types

import pytest

from dynamo.base import errors
from dynamo.kvbm import storage
from dynamo.kvbm.tiers import CachedBlock
from waiting import PATIENT_S

SIZE = 8192
OURS = {
    "model": "m", "dtype": "float32", "block_size": "16", "num_kv_heads": "4", "tp_rank": "0"
}  # fmt: skip


def content(name):
    buffer = bytearray(SIZE)
    buffer[:8] = name.to_bytes(8, "little")
    return memoryview(buffer)


def open_file(directory, fingerprint=OURS, num_slots=8, block_bytes=SIZE):
    return storage.DiskFile(directory, fingerprint, block_bytes=block_bytes, num_slots=num_slots)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cache"


def fill(file, *names):
    for slot, name in enumerate(names):
        parent = names[slot - 1] if slot else None
        file.write(slot, (CachedBlock(name, name + 1, parent),), (content(name),), 0)


FIRST = (CachedBlock(10, 11, None),)


def is_whole(file, slot, segment=FIRST):
    return not file.read(slot, segment, [memoryview(bytearray(SIZE))])


def test_blocks_are_found_again_after_a_restart(directory):
    first = open_file(directory)
    fill(first, 10, 20, 30)
    first.close()
    again = open_file(directory)
    buffer = memoryview(bytearray(SIZE))

    assert again.blocks == {
        0: (CachedBlock(10, 11, None),), 1: (CachedBlock(20, 21, 10),), 2: (CachedBlock(30, 31, 20),)
    }  # fmt: skip
    assert not again.read(1, again.blocks[1], [buffer])
    assert buffer == content(20)
    again.close()


def test_system_without_locks_of_open_files_is_refused_by_name(directory, monkeypatch):
    monkeypatch.delattr(storage.slot_file.fcntl, "F_OFD_SETLK")

    with pytest.raises(errors.ConfigError, match="--kvbm-nvme-path: expected Linux"):
        open_file(directory)


def test_only_the_owner_can_read_the_file(directory):
    file = open_file(directory)

    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    file.close()


def test_wrong_byte_is_found(directory):
    file = open_file(directory)
    fill(file, 10)
    file.close()
    with file.path.open("r+b") as raw:
        raw.seek(2 * storage.PAGE_BYTES + 77)
        raw.write(b"x")
    again = open_file(directory)

    assert not is_whole(again, 0, again.blocks[0])
    again.close()


def test_slot_that_holds_another_block_is_not_read_as_the_one_before(directory):
    file = open_file(directory)
    fill(file, 10)
    file.write(0, (CachedBlock(99, 99, None),), (content(99),), 0)
    file.close()
    again = open_file(directory)

    assert again.blocks == {0: (CachedBlock(99, 99, None),)}
    again.close()


def test_damaged_record_is_left_out(directory):
    file = open_file(directory)
    fill(file, 10, 20)
    file.close()
    with file.path.open("r+b") as raw:
        raw.seek(storage.PAGE_BYTES + 3)
        raw.write(b"x")
    again = open_file(directory)

    assert [block.sequence_hash for (block,) in again.blocks.values()] == [20]
    again.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("dtype", "bfloat16"),
        ("block_size", "32"),
        ("num_kv_heads", "8"),
        ("tp_rank", "1"),
    ],
)
def test_file_of_another_engine_is_refused_by_name(directory, field, value):
    open_file(directory).close()

    with pytest.raises(errors.ConfigError, match=f"{field} is {OURS[field]}, ours is {value}"):
        open_file(directory, OURS | {field: value})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"letters to my love", id="a text"),
        pytest.param(b'{"format": "\xff"}', id="no UTF-8"),
        pytest.param(b'{"x": ' + b"[" * 4000, id="nested without an end"),
    ],
)
def test_file_that_holds_something_else_is_refused(directory, content):
    directory.mkdir()
    (directory / storage.FILE_NAME).write_bytes(content)

    with pytest.raises(errors.ConfigError, match="holds something else than KV blocks"):
        open_file(directory)
    assert (directory / storage.FILE_NAME).read_bytes() == content


def test_second_user_of_a_file_is_refused(directory):
    first = open_file(directory)

    with pytest.raises(errors.ConfigError, match="in use by another process"):
        open_file(directory)
    first.close()
    open_file(directory).close()


def test_file_of_another_size_begins_empty(directory):
    file = open_file(directory)
    fill(file, 10)
    file.close()
    again = open_file(directory, num_slots=4)

    assert again.blocks == {}
    assert storage.read_header(directory).num_slots == 4
    again.close()


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (2 * storage.PAGE_BYTES + 2 * SIZE + 1, [10, 20]),  # within the third block
        (storage.PAGE_BYTES + 100, []),  # within the index
        (storage.PAGE_BYTES - 10, []),  # within the header, after its text
    ],
)
def test_file_that_was_cut_short_is_made_whole(directory, caplog, num_bytes, expected):
    file = open_file(directory)
    fill(file, 10, 20, 30)
    whole = file.path.stat().st_size
    file.close()
    os.truncate(file.path, num_bytes)
    again = open_file(directory)
    names = [block.sequence_hash for (block,) in again.blocks.values()]
    again.write(7, (CachedBlock(40, 41, None),), (content(40),), again.generation)

    assert names == expected
    assert again.path.stat().st_size == whole
    assert is_whole(again, 7, (CachedBlock(40, 41, None),))
    assert "was cut short" in caplog.text
    again.close()


def test_file_that_was_cut_short_while_another_process_shares_it_begins_empty(directory):
    def open_part():
        return storage.DiskFile(directory, OURS, block_bytes=SIZE, num_slots=8, num_parts=2)

    first = open_part()
    fill(first, 10)
    os.truncate(first.path, 2 * storage.PAGE_BYTES)
    second = open_part()

    assert first.look().is_cleared
    assert not is_whole(first, 0)
    first.write(0, FIRST, (content(10),), first.generation)
    assert is_whole(first, 0)
    assert second.look().stored == {0: FIRST[0]}
    first.close()
    second.close()


def test_shared_file_without_its_header_cannot_be_looked_at_or_forgotten(directory):
    file = storage.DiskFile(directory, OURS, block_bytes=SIZE, num_slots=8, num_parts=2)
    os.truncate(file.path, 100)

    with pytest.raises(OSError, match="was cut short"):
        file.look()
    with pytest.raises(OSError, match="was cut short"):
        file.forget()
    file.close()


def test_erased_index_stays_erased_after_a_restart(directory):
    file = open_file(directory)
    fill(file, 10)
    file.forget()
    file.close()
    again = open_file(directory)

    assert again.blocks == {}
    again.close()


def test_size_that_does_not_fit_is_refused_with_the_largest_that_does(directory):
    with pytest.raises(
        errors.ConfigError, match=r"do not fit into the .* the largest that fits is"
    ):
        open_file(directory, num_slots=10**12)


def test_unusable_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(errors.ConfigError, match="--kvbm-nvme-path: cannot open"):
        open_file(tmp_path / "file")


def test_file_system_that_cannot_bypass_its_cache_gets_one_warning(directory, monkeypatch, caplog):
    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, *rest)

    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    file = open_file(directory)
    fill(file, 10, 20)

    assert is_whole(file, 1)
    assert sum("page cache" in record.message for record in caplog.records) == 1
    file.close()


def test_write_that_cannot_bypass_the_cache_goes_through_it(directory, monkeypatch, caplog):
    file, real = open_file(directory), os.pwritev
    if file._direct_fd < 0:
        pytest.skip("this file system opens no file with O_DIRECT")

    def refuse(fd, *rest):
        if fd == file._direct_fd:
            file._go_buffered("another thread was quicker")
            raise OSError(errno.EINVAL, "not so")
        return real(fd, *rest)

    monkeypatch.setattr(os, "pwritev", refuse)
    fill(file, 10, 20)

    assert is_whole(file, 1)
    assert sum("page cache" in record.message for record in caplog.records) == 1
    file.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_that_cannot_reserve_space_gets_one_warning(
    directory, monkeypatch, caplog, code
):
    def refuse(*_):
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(storage, "_libc", types.SimpleNamespace(fallocate=refuse))
    file = open_file(directory)
    fill(file, 10)

    assert is_whole(file, 0)
    assert sum("cannot reserve space" in record.message for record in caplog.records) == 1
    file.close()


def test_blocks_that_are_not_whole_pages_are_kept(directory):
    file = open_file(directory, block_bytes=6000)
    body = memoryview(bytearray(range(250)) * 24)
    file.write(3, (CachedBlock(1, 2, None),), (body,), 0)
    buffer = memoryview(bytearray(6000))

    assert not file.read(3, [CachedBlock(1, 2, None)], [buffer])
    assert buffer == body
    file.close()


def write_for_ever(directory, pipe):
    file = open_file(directory)
    number = 0
    while True:
        number += 1
        file.write(number % 8, (CachedBlock(number, number, None),), (content(number),), 0)
        if number == 50:
            pipe.send("well under way")


def test_file_of_another_process_is_refused_until_that_ends(directory):
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    writer = multiprocessing.get_context("spawn").Process(
        target=write_for_ever, args=(directory, theirs)
    )
    writer.start()
    assert ours.poll(PATIENT_S)

    with pytest.raises(
        errors.ConfigError, match="in use by another process: end it, or give each worker"
    ):
        open_file(directory)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    open_file(directory).close()


def test_killed_writer_leaves_only_blocks_that_are_right(directory):
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        ours, theirs = context.Pipe()
        writer = context.Process(target=write_for_ever, args=(directory, theirs))
        writer.start()
        assert ours.poll(30)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        file = open_file(directory)
        buffer = memoryview(bytearray(SIZE))
        right = [
            block
            for slot, (block,) in file.blocks.items()
            if file.read(slot, [block], [buffer]) or buffer == content(block.sequence_hash)
        ]

        assert len(right) == len(file.blocks) >= 7
        file.close()


def test_full_disk_fails_the_write_alone(directory, monkeypatch):
    file = open_file(directory)

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match="no space"):
            fill(file, 10)
    fill(file, 20)

    assert is_whole(file, 0)
    file.close()
