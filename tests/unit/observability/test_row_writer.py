"""Rows reach their sinks, and rows that do not fit into the queue are dropped and counted."""

import errno
import gzip
import json
import os
import stat
import threading
import types
import zlib

import pytest

from dynamo.base import errors
from dynamo.observability import metrics, row_writer
from waiting import PATIENT_S

SINKS = "DYN_AUDIT_SINKS"


def options(path, /, **fields):
    defaults = {"variable": SINKS, "sinks": ("jsonl",), "path": path, "capacity": 100,
                "buffer_bytes": 2**20, "flush_s": 60.0, "roll_bytes": 0}  # fmt: skip
    return row_writer.RowOptions(**defaults | fields)


@pytest.fixture
def dropped():
    return metrics.Registry("t").counter("dropped_total", "x")


def number(value):
    return value._value.get()


def encode(row):
    return json.dumps(row).encode()


def test_rows_are_lines_of_the_file_in_order(tmp_path, dropped):
    writer = row_writer.RowWriter(options(tmp_path / "a.jsonl"), encode, dropped)
    for n in range(50):
        writer.put({"n": n})
    writer.close()
    path = tmp_path / "a.jsonl"

    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == list(range(50))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert number(dropped) == 0


@pytest.mark.parametrize("has_successor", [False, True])
def test_rows_after_a_rotation_are_in_a_new_file(tmp_path, has_successor):
    """As logrotate moves a file away, with `nocreate` or with `create`."""
    path, rotated = tmp_path / "a.jsonl", tmp_path / "a.jsonl.1"
    sink = row_writer.JsonlSink(path)
    sink.write(b"1\n", 1)
    path.rename(rotated)
    if has_successor:
        path.touch()
    sink.write(b"2\n", 1)
    sink.write(b"3\n", 1)
    sink.close()

    assert (rotated.read_text(), path.read_text()) == ("1\n", "2\n3\n")


def test_rows_go_on_once_a_new_file_can_be_made_after_a_rotation(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    sink = row_writer.JsonlSink(folder / "a.jsonl")
    folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        sink.write(b"1\n", 1)
    folder.mkdir()
    sink.write(b"2\n", 1)
    sink.close()

    assert (folder / "a.jsonl").read_text() == "2\n"


def test_full_buffer_is_written_before_the_flush_interval_ends(tmp_path, dropped):
    written = threading.Event()

    def encode_and_signal(row):
        written.set()
        return encode(row)

    writer = row_writer.RowWriter(
        options(tmp_path / "a", buffer_bytes=10), encode_and_signal, dropped
    )
    writer.put({}, 10)

    assert written.wait(PATIENT_S)
    writer.close()


def test_full_compressed_file_is_followed_by_the_next(tmp_path, dropped):
    rolling = options(tmp_path / "a.jsonl.gz", sinks=("jsonl_gz",), roll_lines=1, capacity=1000)
    written = threading.Semaphore(0)

    def encode_and_signal(row):
        written.release()
        return encode(row)

    writer = row_writer.RowWriter(rolling, encode_and_signal, dropped)
    for n in range(3):
        writer.put({"n": n}, 2**21)  # more than enough to be written at once
        assert written.acquire(timeout=PATIENT_S)
    writer.close()
    files = sorted(tmp_path.glob("a-*.jsonl.gz"))

    assert [json.loads(gzip.decompress(f.read_bytes())) for f in files] == [
        {"n": 0}, {"n": 1}, {"n": 2},
    ]  # fmt: skip


def test_rows_behind_those_of_a_killed_process_of_the_same_number_are_readable(tmp_path):
    """In a container each process has the number of the former one."""
    for n in range(2):
        sink = row_writer.GzipSink(tmp_path / "a", roll_bytes=0, roll_lines=0)
        sink.write(b"%d\n" % n, 1)
        os.close(sink._file)  # as by SIGKILL
    first, second = sorted(tmp_path.iterdir())
    rows = [zlib.decompressobj(wbits=31).decompress(p.read_bytes()) for p in (first, second)]

    assert rows == [b"0\n", b"1\n"]


def test_file_that_cannot_be_followed_costs_its_rows_and_no_other_file(tmp_path):
    """Processes of one number, as in containers that share a volume, use each other's names."""
    taken, blocked = (tmp_path / f"a-{os.getpid()}-{n:06}.jsonl.gz" for n in (1, 2))
    sink = row_writer.GzipSink(tmp_path / "a", roll_bytes=0, roll_lines=1)
    sink.write(b"0\n", 1)
    taken.write_bytes(b"x")
    blocked.mkdir()
    with pytest.raises(IsADirectoryError):
        sink.write(b"1\n", 1)
    with (tmp_path / "other").open("xb"), pytest.raises(IsADirectoryError):
        sink.write(b"2\n", 1)
    blocked.rmdir()
    sink.write(b"3\n", 1)
    sink.close()

    assert (tmp_path / "other").read_bytes() == b""
    assert gzip.decompress(blocked.read_bytes()) == b"3\n"


def test_row_beyond_the_capacity_is_dropped_and_counted(tmp_path, dropped):
    may_write, is_busy = threading.Event(), threading.Event()

    def wait(row):
        is_busy.set()
        may_write.wait(PATIENT_S)
        return encode(row)

    writer = row_writer.RowWriter(options(tmp_path / "a", capacity=2), wait, dropped)
    writer.put({"n": 0})  # half of the capacity: the thread takes it
    assert is_busy.wait(PATIENT_S)
    for n in range(1, 6):
        writer.put({"n": n})
    may_write.set()
    writer.close()

    assert number(dropped) == 3
    assert [json.loads(line)["n"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
    ]


def test_row_beyond_the_queue_bytes_is_dropped(tmp_path, dropped):
    writer = row_writer.RowWriter(options(tmp_path / "a"), encode, dropped)
    writer.put({}, row_writer.MAX_QUEUED_BYTES + 1)
    writer.close()

    assert number(dropped) == 1


def test_row_after_close_is_dropped_and_counted(tmp_path, dropped):
    writer = row_writer.RowWriter(options(tmp_path / "a"), encode, dropped)
    writer.close()
    writer.put({})

    assert number(dropped) == 1


def test_close_gives_up_on_a_disk_that_hangs(tmp_path, dropped, caplog, monkeypatch):
    has_begun, may_end = threading.Event(), threading.Event()

    def hang(row):
        has_begun.set()
        may_end.wait(PATIENT_S)
        return b"{}"

    monkeypatch.setattr(row_writer, "CLOSE_S", 0)
    writer = row_writer.RowWriter(options(tmp_path / "a.jsonl", buffer_bytes=1), hang, dropped)
    writer.put({}, 1)
    assert has_begun.wait(PATIENT_S)
    writer.close()
    may_end.set()

    assert "the last rows could not be written within 0 s" in caplog.text


def test_rows_that_fail_to_be_written_are_counted_and_logged(tmp_path, dropped, caplog):
    writer = row_writer.RowWriter(options(tmp_path / "a"), lambda row: 1 // row, dropped)
    writer.put(0)
    writer.close()

    assert number(dropped) == 1
    assert "DYN_AUDIT_SINKS: 1 rows could not be written" in caplog.text


@pytest.fixture
def disk(monkeypatch):
    """Let a file take `disk.room` more bytes."""
    state, write = types.SimpleNamespace(room=10**9), os.write

    def write_what_fits(file, data):
        if not state.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(file, data[: state.room])
        state.room -= taken
        return taken

    monkeypatch.setattr(row_writer.os, "write", write_what_fits)
    return state


def write_beyond_a_full_disk(path, sink, disk, dropped, caplog):
    """Write a row before, three while the disk is full, and one after."""
    caplog.set_level("WARNING")
    writer = row_writer.RowWriter(options(path, sinks=(sink,)), encode, dropped)
    for name, room in (("before", 10**9), (1, 5), (2, 0), (3, 0), ("after", 10**9)):
        disk.room = room
        writer.put({"n": name})
        writer._flush()
    writer.close()


def test_full_disk_leaves_whole_lines_and_says_so_once(tmp_path, dropped, caplog, disk):
    write_beyond_a_full_disk(tmp_path / "a", "jsonl", disk, dropped, caplog)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()

    assert [json.loads(line) for line in lines] == [{"n": "before"}, {"n": "after"}]
    assert number(dropped) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "DYN_AUDIT_SINKS: 1 rows could not be written: [Errno 28] No space left on device; "
        "the next line on this says how many were lost",
        "DYN_AUDIT_SINKS: rows are written again; 3 were lost",
    ]
    assert not caplog.records[0].exc_info


def test_compressed_rows_are_readable_after_a_full_disk(tmp_path, dropped, caplog, disk):
    write_beyond_a_full_disk(tmp_path / "a", "jsonl_gz", disk, dropped, caplog)
    files = sorted(tmp_path.glob("a-*.jsonl.gz"))
    texts = [zlib.decompressobj(wbits=31).decompress(file.read_bytes()) for file in files]

    assert len(files) == 2
    assert b"".join(texts) == b'{"n": "before"}\n{"n": "after"}\n'
    assert number(dropped) == 3


def test_stderr_sink_writes_to_standard_error(capsys, dropped):
    writer = row_writer.RowWriter(options(None, sinks=("stderr",)), encode, dropped)
    writer.put({"n": 1})
    writer.close()

    assert capsys.readouterr().err == '{"n": 1}\n'


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sinks": ("nats",)}, "got 'nats' \\(not supported yet\\)"),
        ({"sinks": ("jsonl", "disk")}, "expected sinks out of stderr, jsonl, jsonl_gz, got 'disk'"),
        ({"path": None}, "the sink 'jsonl' needs a file: set DYN_AUDIT_OUTPUT_PATH"),
    ],
)
def test_unknown_sink_or_missing_path_is_a_config_error(tmp_path, fields, sentence):
    with pytest.raises(errors.ConfigError, match=sentence):
        row_writer.check_options(options(tmp_path / "a", **fields))


def test_path_that_cannot_be_opened_is_a_config_error(tmp_path, dropped):
    with pytest.raises(errors.ConfigError, match="cannot write to"):
        row_writer.RowWriter(options(tmp_path / "none" / "a"), encode, dropped)


def test_sink_that_fails_keeps_no_rows_from_the_next(tmp_path, dropped, monkeypatch):
    def refuse(text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    writer = row_writer.RowWriter(
        options(tmp_path / "a", sinks=("stderr", "jsonl")), encode, dropped
    )
    monkeypatch.setattr("sys.stderr", types.SimpleNamespace(write=refuse))
    writer.put({"n": 1})
    writer.close()

    assert (tmp_path / "a.jsonl").read_text() == '{"n": 1}\n'
    assert number(dropped) == 1


@pytest.fixture
def shared(tmp_path):
    """A folder as /tmp, where all users may make files."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_link_where_all_users_may_make_one_is_not_followed(shared, tmp_path, dropped):
    (shared / "a.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.ConfigError, match="cannot write to"):
        row_writer.RowWriter(options(shared / "a"), encode, dropped)

    assert not (tmp_path / "elsewhere").exists()


def test_file_that_another_user_made_there_gets_no_rows(shared, dropped, monkeypatch):
    (shared / "a.jsonl").touch()
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)

    with pytest.raises(errors.ConfigError, match="another user made it"):
        row_writer.RowWriter(options(shared / "a"), encode, dropped)


def test_own_file_there_is_continued(shared, dropped):
    for n in range(2):
        writer = row_writer.RowWriter(options(shared / "a"), encode, dropped)
        writer.put({"n": n})
        writer.close()

    assert (shared / "a.jsonl").read_text() == '{"n": 0}\n{"n": 1}\n'
