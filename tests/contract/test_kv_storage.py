"""What every storage below host memory promises: blocks come back whole or not at all, also after a restart."""

import base64
import contextlib
import http.client
import http.server
import importlib.util
import os
import shutil
import stat
import threading
import time

import pytest

import ports
from dynamo.base import errors
from dynamo.kvbm import storage as storages
from dynamo.kvbm.tiers import CachedBlock
from waiting import PATIENT_S

SIZE, NUM_SLOTS = 8192, 4
BLOCK_SIZE = 64  # tokens, of which four blocks are an object
OURS = {"model": "m", "dtype": "float32"}
HAS_OBSTORE = importlib.util.find_spec("obstore") is not None
needs_obstore = pytest.mark.skipif(not HAS_OBSTORE, reason="obstore is not installed")
if HAS_OBSTORE:
    import obstore

    from dynamo.kvbm import object_storage

HAS_MOTO = HAS_OBSTORE and importlib.util.find_spec("moto") is not None
needs_moto = pytest.mark.skipif(not HAS_MOTO, reason="moto or obstore is not installed")


def content(name):
    return memoryview(bytearray(name.to_bytes(8, "little") * (SIZE // 8)))


def segment(storage, name):
    """Return the blocks of one slot; the first ones of a chain if `name` is 1."""
    names = [100 * name + i for i in range(storage.slots.segment_blocks)]
    parents = [None if name == 1 else 100 * name - 1, *names]
    return tuple([CachedBlock(n, n + 1, parent) for n, parent in zip(names, parents, strict=False)])


def write(storage, slot, name, generation=0):
    blocks = segment(storage, name)
    storage.write(slot, blocks, [content(b.sequence_hash) for b in blocks], generation)


def read(storage, slot, name, which=slice(None)):
    """Read blocks of a segment; return how many of them are not what was written, and check the others."""
    blocks = segment(storage, name)[which]
    buffers = [memoryview(bytearray(SIZE)) for _ in blocks]
    failed = storage.read(slot, blocks, buffers)
    for i, (block, buffer) in enumerate(zip(blocks, buffers, strict=True)):
        assert i in failed or buffer == content(block.sequence_hash)
    return len(failed)


def found(storage):
    """Return the names of the segments that an earlier run has left, used longest ago first."""
    names = [blocks[0].sequence_hash // 100 for blocks in storage.slots.stored.values()]
    assert list(storage.slots.stored.values()) == [segment(storage, name) for name in names]
    return names


def open_file(directory, fingerprint):
    return storages.DiskFile(directory, fingerprint, block_bytes=SIZE, num_slots=NUM_SLOTS)


def open_nixl(directory, fingerprint):
    pytest.importorskip("nixl", reason="nixl is not installed")
    from benchmarks import nixl_posix

    return nixl_posix.NixlPosixFile(directory, fingerprint, block_bytes=SIZE, num_slots=NUM_SLOTS)


def open_url(url, fingerprint, *, num_blocks=4 * NUM_SLOTS, block_size=BLOCK_SIZE, part=""):
    return object_storage.ObjectStorage(
        url, fingerprint, num_blocks=num_blocks, block_size=block_size, part=part
    )


def open_objects(directory, fingerprint, **options):
    directory.mkdir(exist_ok=True)
    return open_url(directory.as_uri(), fingerprint, **options)


def open_single_blocks(directory, fingerprint):
    """Open objects for blocks that are so long that each has one of its own."""
    return open_objects(directory, fingerprint, num_blocks=NUM_SLOTS, block_size=512)


def open_bucket(directory, fingerprint):
    """Open the tier in the bucket of the running `s3`, under a prefix of this test alone."""
    return open_url(f"s3://cache{directory}", fingerprint)


class FaultyStore(http.server.ThreadingHTTPServer):
    """Amazon's S3 as moto plays it, behind a proxy that can be slow, wrong, failing or gone."""

    daemon_threads = True
    fault = None  # "hangs", "fails", "damages" or "closes"

    def __init__(self, address):
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.store_address, self.may_answer = address, threading.Event()


class ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.fault == "hangs":
            self.server.may_answer.wait()
        if self.server.fault in ("closes", "hangs"):
            self.close_connection = True
            return
        with contextlib.closing(http.client.HTTPConnection(*self.server.store_address)) as store:
            store.request(self.command, self.path, body, dict(self.headers))
            answer = store.getresponse()
            content = answer.read()
        if self.server.fault == "damages":
            content = content[:-1] + b"!"
        self.send_response(503 if self.server.fault == "fails" else answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def moto_address():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = server.get_host_and_port()
    with contextlib.closing(http.client.HTTPConnection(*address)) as store:
        store.request("PUT", "/cache")
        assert store.getresponse().status == 200
    yield address
    server.stop()


@pytest.fixture
def s3(moto_address, monkeypatch):
    store = FaultyStore(moto_address)
    thread = threading.Thread(target=store.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield store
    store.may_answer.set()
    store.shutdown()
    store.server_close()
    thread.join()


@pytest.fixture(
    params=[
        open_file,
        open_nixl,
        pytest.param(open_objects, marks=needs_obstore),
        pytest.param(open_single_blocks, marks=needs_obstore),
        pytest.param(open_bucket, marks=needs_moto),
    ]
)
def reopen(request, tmp_path):
    """Open the storage in one place; the one that was open is closed."""
    if request.param is open_bucket:
        request.getfixturevalue("s3")
    opened = []

    def reopen(fingerprint=OURS):
        for storage in opened:
            storage.close()
        opened.append(request.param(tmp_path / "cache", fingerprint))
        return opened[-1]

    yield reopen
    for storage in opened:
        storage.close()


def objects_in(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


def test_written_blocks_are_read_again(reopen):
    storage = reopen()
    write(storage, 2, 7)

    assert read(storage, 2, 7) == 0
    assert read(storage, 1, 7) == storage.slots.segment_blocks
    assert storage.slots.num == NUM_SLOTS


def test_slot_holds_what_was_written_last(reopen):
    storage = reopen()
    for name in (7, 8, 8, 9):
        write(storage, 0, name)

    assert read(storage, 0, 9) == 0
    assert found(reopen()) == [9]


def test_restart_finds_the_blocks_with_their_names(reopen):
    storage = reopen()
    for slot, name in enumerate((1, 2, 3)):
        write(storage, slot, name)
    storage = reopen()

    assert sorted(found(storage)) == [1, 2, 3]
    assert not any(
        read(storage, s, b[0].sequence_hash // 100) for s, b in storage.slots.stored.items()
    )


def test_forgotten_blocks_are_found_neither_now_nor_after_a_restart(reopen):
    storage = reopen()
    write(storage, 0, 1)
    storage.forget()

    assert read(storage, 0, 1) == storage.slots.segment_blocks
    write(storage, 1, 2, storage.generation)
    storage.purge()
    assert read(storage, 1, 2) == 0
    assert found(reopen()) == [2]


def test_write_that_was_asked_for_before_all_was_forgotten_is_not_found_after_a_restart(reopen):
    storage = reopen()
    generation = storage.generation
    storage.forget()
    with contextlib.suppress(OSError):
        write(storage, 0, 1, generation)
    write(storage, 1, 2, storage.generation)

    assert found(reopen()) == [2]


def test_generation_goes_on_after_a_restart(reopen):
    storage = reopen()
    storage.forget()
    storage = reopen()
    write(storage, 0, 1, storage.generation)
    storage = reopen()
    storage.forget()
    storage.purge()

    assert not found(reopen())


def test_blocks_of_another_model_are_never_found(reopen):
    write(reopen(), 0, 1)
    names = []
    with contextlib.suppress(errors.ConfigError):  # a file is refused by name
        names = found(reopen({**OURS, "model": "other"}))

    assert not names


@needs_obstore
@pytest.mark.parametrize(
    ("block_size", "expected"), [(4, 16), (16, 16), (32, 8), (96, 2), (128, 2), (256, 1), (1024, 1)]
)
def test_object_has_as_many_blocks_as_make_256_tokens(tmp_path, block_size, expected):
    storage = open_objects(tmp_path, OURS, block_size=block_size, num_blocks=100)
    write(storage, 0, 1)

    assert storage.slots.segment_blocks == expected
    assert storage.slots.num == 100 // expected
    assert len(objects_in(tmp_path)) == 1
    assert found(open_objects(tmp_path, OURS, block_size=block_size, num_blocks=100)) == [1]


@needs_obstore
def test_tier_that_is_smaller_than_an_object_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="--kvbm-object-num-blocks 3: expected at least 4"):
        open_objects(tmp_path, OURS, num_blocks=3)


@needs_obstore
def test_part_of_an_object_is_read_by_one_request(tmp_path, monkeypatch):
    storage, get_range, ranges = open_objects(tmp_path, OURS), obstore.get_range, []
    write(storage, 0, 1)

    def count(store, path, *, start, end):
        ranges.append(end - start)
        return get_range(store, path, start=start, end=end)

    monkeypatch.setattr(obstore, "get_range", count)

    assert [read(storage, 0, 1, slice(*at)) for at in ((0, 4), (1, 3), (3, 4))] == [0, 0, 0]
    assert ranges == [num_blocks * (SIZE + 8) for num_blocks in (4, 2, 1)]


@needs_obstore
def test_two_workers_share_a_prefix(tmp_path):
    first = open_objects(tmp_path / "shared", OURS)
    write(first, 0, 1)
    second = open_objects(tmp_path / "shared", OURS)
    assert read(second, 0, 1) == 0
    write(first, 0, 2)  # evicts what was there

    assert read(second, 0, 1) == 4
    write(second, 0, 3)
    assert read(first, 0, 2) == 0


def find(storage, slot, name):
    return storage.find_segment(slot, segment(storage, name), storage.generation)


def test_segment_that_was_not_stored_is_not_found_by_its_name(reopen):
    storage = reopen()

    assert not find(storage, NUM_SLOTS, 1)
    assert read(storage, NUM_SLOTS - 1, 1) == storage.slots.segment_blocks


@needs_obstore
def test_object_of_another_worker_is_found_by_its_name_and_never_removed(tmp_path):
    first, second = (open_objects(tmp_path / "shared", OURS) for _ in range(2))
    write(first, 0, 1)
    others = open_objects(tmp_path / "shared", {**OURS, "model": "other"})

    assert find(second, NUM_SLOTS, 1)
    assert read(second, NUM_SLOTS, 1, slice(1, 3)) == 0
    assert not find(others, NUM_SLOTS, 1)
    for name in range(2, 3 * NUM_SLOTS):
        write(second, name % NUM_SLOTS, name)
    assert read(first, 0, 1) == 0
    write(first, 0, 9)
    assert read(second, NUM_SLOTS, 1) == 4


@needs_obstore
def test_object_is_not_found_by_its_name_while_all_are_removed(tmp_path, monkeypatch):
    first, second = (open_objects(tmp_path / "shared", OURS) for _ in range(2))
    write(first, 0, 1)
    before = second.generation
    second.forget()
    meanwhile = find(second, NUM_SLOTS, 1)
    with monkeypatch.context() as patch:
        patch.delattr(obstore, "list")
        with pytest.raises(AttributeError):
            second.purge()
    after_failure = find(second, NUM_SLOTS, 1)
    second.purge()
    write(first, 0, 2)

    assert (meanwhile, after_failure) == (False, False)
    assert find(second, NUM_SLOTS, 2)
    assert not second.find_segment(NUM_SLOTS, segment(second, 2), before)


@needs_obstore
def test_blocks_that_two_workers_write_are_stored_once(tmp_path):
    for storage in (open_objects(tmp_path, OURS), open_objects(tmp_path, OURS)):
        write(storage, 0, 1)

    assert len(objects_in(tmp_path)) == 1


@needs_obstore
def test_object_that_was_written_again_from_another_slot_is_kept(tmp_path):
    storage = open_objects(tmp_path, OURS)
    for slot, name in ((0, 1), (1, 1), (0, 2)):
        write(storage, slot, name)

    assert [read(storage, 0, 2), read(storage, 1, 1)] == [0, 0]


@needs_obstore
def test_object_that_is_there_though_its_write_failed_is_removed_by_the_next(tmp_path, monkeypatch):
    storage, put = open_objects(tmp_path, OURS), obstore.put

    def put_and_be_late(*args, **options):
        put(*args, **options)
        raise OSError("no answer in time")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", put_and_be_late)
        with pytest.raises(OSError, match="no answer in time"):
            write(storage, 0, 1)
    assert read(storage, 0, 1) == 4
    write(storage, 0, 2)

    assert len(objects_in(tmp_path)) == 1
    assert read(storage, 0, 2) == 0


@needs_obstore
def test_object_that_could_not_be_removed_is_removed_before_the_next_is_written(
    tmp_path, monkeypatch
):
    storage = open_objects(tmp_path, OURS)
    write(storage, 0, 1)

    def refuse(store, paths):
        raise OSError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "delete", refuse)
        for name in (2, 3):
            with pytest.raises(OSError, match="not now"):
                write(storage, 0, name)
    write(storage, 0, 4)

    assert len(objects_in(tmp_path)) == 1
    assert read(storage, 0, 4) == 0


@needs_obstore
def test_object_whose_write_ends_after_all_was_forgotten_is_removed(tmp_path, monkeypatch):
    storage, put = open_objects(tmp_path / "cache", OURS), obstore.put

    def forget_meanwhile(*args, **options):
        storage.forget()
        return put(*args, **options)

    monkeypatch.setattr(obstore, "put", forget_meanwhile)
    with pytest.raises(OSError, match="all blocks were forgotten"):
        write(storage, 0, 1)

    assert not found(open_objects(tmp_path / "cache", OURS))


@needs_obstore
def test_all_is_forgotten_at_once_though_the_store_hangs(tmp_path, monkeypatch):
    storage = open_objects(tmp_path / "cache", OURS)
    write(storage, 0, 1)
    for name in ("list", "delete"):  # the engine's thread forgets: it must not ask the store
        monkeypatch.delattr(obstore, name)
    storage.forget()

    assert read(storage, 0, 1) == 4


@needs_obstore
@pytest.mark.parametrize("num_removed", [1, 30])
def test_all_is_removed_though_another_worker_removes_some_meanwhile(
    tmp_path, monkeypatch, num_removed
):
    storage, delete = open_objects(tmp_path / "cache", OURS, num_blocks=200), obstore.delete
    for slot in range(40):
        write(storage, slot, slot + 1)
    storage.forget()

    def delete_late(store, paths):
        if len(paths) == 40:
            delete(store, paths[:num_removed])
        delete(store, paths)

    monkeypatch.setattr(obstore, "delete", delete_late)
    storage.purge()

    assert objects_in(tmp_path) == []


@needs_obstore
@pytest.mark.parametrize("is_purged", [True, False])
def test_what_a_killed_writer_has_left_in_a_directory_is_removed(tmp_path, is_purged):
    storage = open_objects(tmp_path / "cache", OURS)
    for name in (1, 2):
        write(storage, name, name)
    storage.forget()
    for path in objects_in(tmp_path):  # as obstore calls what it has not written to the end
        path.rename(f"{path}#1")
    killed_at = time.time() - object_storage.UNFINISHED_S - 1
    os.utime(objects_in(tmp_path)[0], (killed_at, killed_at))
    if is_purged:
        storage.purge()
    else:
        open_objects(tmp_path / "cache", OURS)

    assert len(objects_in(tmp_path)) == 1  # another worker may be writing it


@needs_obstore
def test_only_the_owner_can_read_objects_in_a_directory(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    storage = open_objects(tmp_path / "cache", OURS)
    for name in (1, 2):  # the first one is removed again
        write(storage, 0, name)
    shutil.rmtree(tmp_path / "cache")
    write(storage, 0, 3)
    (directory,) = (tmp_path / "cache").iterdir()

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@needs_obstore
def test_removed_object_leaves_no_directory(tmp_path):
    storage = open_objects(tmp_path, OURS)
    for name in (1, 2, 3):
        write(storage, 0, name)
    (directory,) = tmp_path.iterdir()

    assert len(list(directory.iterdir())) == 1


@needs_obstore
def test_more_objects_than_slots_are_removed_at_the_start(tmp_path):
    for name in range(1, 4):
        other = open_objects(tmp_path, OURS, num_blocks=8 * NUM_SLOTS, part="x")
        for slot in range(2):
            write(other, len(other.slots.stored) + slot, 10 * name + slot)
    storage = open_objects(tmp_path, OURS, part="x")

    assert found(storage) == [20, 21, 30, 31]
    assert len(objects_in(tmp_path)) == NUM_SLOTS


@needs_obstore
@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1] + b"!",  # a wrong byte
        lambda whole: whole[:-1],  # cut
        lambda whole: whole[: 3 * (SIZE + 8)] + whole[: SIZE + 8],  # another block of the segment
    ],
)
def test_wrong_block_is_found_and_the_others_are_read(tmp_path, damage):
    storage = open_objects(tmp_path, OURS)
    write(storage, 0, 1)
    (path,) = objects_in(tmp_path)
    path.write_bytes(damage(path.read_bytes()))

    assert read(storage, 0, 1) == 1
    assert read(storage, 0, 1, slice(0, 3)) == 0


@needs_obstore
def test_object_that_is_shorter_than_what_is_read_of_it_is_wrong(tmp_path):
    storage = open_objects(tmp_path, OURS)
    write(storage, 0, 1)
    (path,) = objects_in(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(OSError, match=r"."):
        read(storage, 0, 1)


@needs_obstore
def test_what_is_no_segment_is_removed_at_the_start(tmp_path):
    storage = open_objects(tmp_path, OURS)
    write(storage, 0, 1)
    (path,) = objects_in(tmp_path)
    directory = path.parents[1]
    for name in (
        f"{7:016x}-{8:016x}-{6:016x}",  # a block, as earlier builds named it
        "notes.txt",
        f"{path.parent.name}/AAAA",
        f"{base64.urlsafe_b64encode(4 * bytes(8)).decode().rstrip('=')}/{path.name}",  # one hash four times
        f"{path.parent.name[:-1]}/{path.name}",
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("nothing of ours")

    assert found(open_objects(tmp_path, OURS)) == [1]
    assert objects_in(tmp_path) == [path]


@needs_obstore
@pytest.mark.parametrize("is_cleared", [False, True])
def test_worker_of_one_rank_leaves_the_objects_of_ranks_with_the_same_blocks(tmp_path, is_cleared):
    ranks = [open_objects(tmp_path, OURS, part=part) for part in ("dp0", "dp1")]
    for rank in ranks:
        write(rank, 0, 1)
    alone = open_objects(tmp_path, OURS)
    if is_cleared:
        alone.forget()
        alone.purge()

    assert found(alone) == []
    assert [read(rank, 0, 1) for rank in ranks] == [0, 0]


@needs_obstore
def test_absent_store_is_refused_at_start_and_named(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports.reserve()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(errors.ConfigError, match="--kvbm-object-store s3://none/x: expected a"):
        open_url("s3://none/x", OURS)


@needs_obstore
@pytest.mark.parametrize("url", ["file:relative", "file://relative/x", "file:", "file://host/{}"])
def test_directory_without_an_absolute_path_is_refused_before_it_is_made(
    tmp_path, monkeypatch, url
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ConfigError, match=r"no absolute path, as in file:///DIRECTORY"):
        open_url(url.format(tmp_path / "x"), OURS)

    assert list(tmp_path.iterdir()) == []


@needs_obstore
def test_failing_store_is_an_error_of_the_system(tmp_path, monkeypatch):
    storage = open_objects(tmp_path / "cache", OURS)
    write(storage, 0, 1)

    def fail(*args, **options):
        raise obstore.exceptions.GenericError("no answer\ndump of a value")

    for name in ("put", "get_range", "list", "head"):
        monkeypatch.setattr(obstore, name, fail)
    for call in (
        lambda: write(storage, 1, 2),
        lambda: read(storage, 0, 1),
        lambda: find(storage, NUM_SLOTS, 1),
        storage.purge,
    ):
        with pytest.raises(OSError, match=r"^no answer$"):
            call()


@needs_moto
@pytest.mark.parametrize("fault", ["hangs", "fails", "closes"])
def test_store_that_stops_answering_is_an_error_within_its_time_limit(
    s3, tmp_path, monkeypatch, fault
):
    monkeypatch.setattr(object_storage, "TIMEOUT_S", 2)
    storage = open_bucket(tmp_path, OURS)
    write(storage, 0, 1)
    s3.fault = fault
    began_at = time.monotonic()
    with pytest.raises(OSError, match=r"."):
        read(storage, 0, 1)
    with pytest.raises(OSError, match=r"."):
        find(storage, NUM_SLOTS, 1)

    assert time.monotonic() - began_at < PATIENT_S
    s3.fault = None
    assert find(storage, NUM_SLOTS, 1)
    assert read(storage, 0, 1) == 0  # the blocks were not lost


@needs_moto
def test_wrong_byte_from_a_store_is_found(s3, tmp_path):
    storage = open_bucket(tmp_path, OURS)
    write(storage, 0, 1)
    s3.fault = "damages"

    assert read(storage, 0, 1) == 1  # the last byte is that of the last block
