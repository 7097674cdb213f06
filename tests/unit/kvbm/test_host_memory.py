"""How much memory the host tier may take."""

import ctypes
import errno
import types

import pytest

from dynamo.base import errors
from dynamo.kvbm import host_memory

BLOCK_BYTES = 32_768


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4", 4 * 10**9), ("0.5", 5 * 10**8), ("500MB", 5 * 10**8), ("2 GiB", 2**31), ("4096B", 4096)],
)
def test_size_has_a_unit_or_is_in_gb(text, num_bytes):
    assert host_memory.parse_size(text, "--kvbm-cpu-cache-gb") == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "4 apples", "1e9", "nan"])
def test_other_sizes_are_refused_by_option(text):
    with pytest.raises(errors.ConfigError, match="--kvbm-cpu-cache-gb: expected a size"):
        host_memory.parse_size(text, "--kvbm-cpu-cache-gb")


@pytest.fixture
def memory(monkeypatch):
    """10 GB are left."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10 * 10**9)


def test_auto_takes_a_share_of_what_is_left(memory):
    assert host_memory.count_host_blocks("auto", None, 10**6, 2 * 10**9) == 2000


def test_size_is_rounded_down_to_blocks(memory):
    assert host_memory.count_host_blocks("1", None, 3 * 10**6, 0) == 333


@pytest.mark.parametrize(("size", "num_blocks"), [("9.9", None), ("auto", 9900)])
def test_size_that_does_not_fit_is_refused_with_both_numbers_and_the_largest(
    memory, size, num_blocks
):
    message = r"9\.9 GB \(9900 blocks\) do not fit into the 10 GB .* largest that fits is 9\.5 GB"
    with pytest.raises(errors.ConfigError, match=message):
        host_memory.count_host_blocks(size, num_blocks, 10**6, 0)


def test_size_of_terabytes_is_named_without_an_exponent(memory):
    with pytest.raises(errors.ConfigError, match="2500 GB"):
        host_memory.count_host_blocks("2500", None, 10**6, 0)


def test_size_below_one_block_is_refused(memory):
    with pytest.raises(errors.ConfigError, match="expected room for a block"):
        host_memory.count_host_blocks("1KB", None, 10**6, 0)


def test_limit_of_a_control_group_counts(tmp_path, monkeypatch):
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    for name, text in (("memory.max", "max"), ("memory.current", "5"), ("memory.stat", "")):
        (group / name).write_text(text)
    for name, text in (
        ("memory.max", "1000000"),
        ("memory.current", "600000"),
        ("memory.stat", "anon 1\ninactive_file 100000"),
    ):
        (tmp_path / "a" / name).write_text(text)
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", own)
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)

    assert host_memory.available_bytes() == 500000


def test_all_memory_counts_where_the_system_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")

    assert host_memory.available_bytes() > 2**27


def test_memory_is_provided_piece_by_piece(monkeypatch):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 30 * BLOCK_BYTES)
    memory = host_memory.HostMemory(100, BLOCK_BYTES)
    memory.block(99)[:4] = b"last"

    assert list(memory.provide()) == [30, 30, 30, 10]
    assert bytes(memory.block(99)[:4]) == b"last"


@pytest.mark.parametrize(("code", "pieces"), [(errno.EINVAL, [50, 50]), (errno.ENOMEM, [])])
def test_pages_that_the_system_refuses_are_not_written(monkeypatch, code, pieces):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 50 * BLOCK_BYTES)
    written = []

    def refuse(*_):
        ctypes.set_errno(code)
        return -1

    libc = types.SimpleNamespace(madvise=refuse, memset=lambda *each: written.append(each[2]))
    monkeypatch.setattr(host_memory, "_libc", libc)

    assert list(host_memory.HostMemory(100, BLOCK_BYTES).provide()) == pieces
    assert written == [num_blocks * BLOCK_BYTES for num_blocks in pieces]


@pytest.mark.parametrize(("reserved", "pieces"), [(0, [100]), (400 * 10**6, [])])
def test_memory_of_the_engines_cache_is_left_though_its_pages_are_not_provided_yet(
    monkeypatch, reserved, pieces
):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 500 * 10**6)

    memory = host_memory.HostMemory(100, BLOCK_BYTES, reserved=reserved)
    assert list(memory.provide()) == pieces


def test_memory_that_others_take_meanwhile_is_not_provided(monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 50 * BLOCK_BYTES)
    left = iter([10**12, 10**6])
    monkeypatch.setattr(host_memory, "available_bytes", lambda: next(left))

    assert list(host_memory.HostMemory(100, BLOCK_BYTES).provide()) == [50]
    assert "stays at 50 blocks of 100" in caplog.text
