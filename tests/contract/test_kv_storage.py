"""What every storage below host memory promises: blocks come back whole or not at all, also after a restart."""

import contextlib
import http.client
import http.server
import importlib.util
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


def block(name):
    return CachedBlock(name, name + 1, name - 1 if name > 1 else None)


def open_file(directory, fingerprint):
    return storages.DiskFile(directory, fingerprint, block_bytes=SIZE, num_slots=NUM_SLOTS)


def open_nixl(directory, fingerprint):
    pytest.importorskip("nixl", reason="nixl is not installed")
    from benchmarks import nixl_posix

    return nixl_posix.NixlPosixFile(directory, fingerprint, block_bytes=SIZE, num_slots=NUM_SLOTS)


def open_objects(directory, fingerprint):
    directory.mkdir(exist_ok=True)
    return object_storage.ObjectStorage(directory.as_uri(), fingerprint, num_slots=NUM_SLOTS)


def open_bucket(directory, fingerprint):
    """Open the tier in the bucket of the running `s3`, under a prefix of this test alone."""
    url = f"s3://cache{directory}"
    return object_storage.ObjectStorage(url, fingerprint, num_slots=NUM_SLOTS)


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


def read(storage, slot):
    """Return the number that fills a block; None if the storage says that it is not what was written."""
    buffer = memoryview(bytearray(SIZE))
    if not storage.read(slot, buffer):
        return None
    assert len(set(buffer.cast("Q"))) == 1
    return buffer.cast("Q")[0]


def test_written_block_is_read_again(reopen):
    storage = reopen()
    storage.write(2, block(7), content(7), 0)

    assert read(storage, 2) == 7
    assert read(storage, 1) is None
    assert storage.num_slots == NUM_SLOTS


def test_slot_holds_what_was_written_last(reopen):
    storage = reopen()
    for name in (7, 8, 8, 9):
        storage.write(0, block(name), content(name), 0)

    assert read(storage, 0) == 9
    assert list(reopen().blocks.values()) == [block(9)]


def test_restart_finds_the_blocks_with_their_names(reopen):
    storage = reopen()
    for slot, name in enumerate((1, 2, 3)):
        storage.write(slot, block(name), content(name), 0)
    storage = reopen()

    assert sorted(storage.blocks.values()) == sorted(map(block, (1, 2, 3)), key=lambda b: b[0])
    assert {read(storage, slot): b for slot, b in storage.blocks.items()} == {
        name: block(name) for name in (1, 2, 3)
    }


def test_forgotten_blocks_are_found_neither_now_nor_after_a_restart(reopen):
    storage = reopen()
    storage.write(0, block(1), content(1), 0)
    storage.forget()

    assert read(storage, 0) is None
    storage.write(1, block(2), content(2), storage.generation)
    storage.purge()
    assert read(storage, 1) == 2
    assert list(reopen().blocks.values()) == [block(2)]


def test_write_that_was_asked_for_before_all_was_forgotten_is_not_found_after_a_restart(reopen):
    storage = reopen()
    generation = storage.generation
    storage.forget()
    with contextlib.suppress(OSError):
        storage.write(0, block(1), content(1), generation)
    storage.write(1, block(2), content(2), storage.generation)

    assert list(reopen().blocks.values()) == [block(2)]


def test_generation_goes_on_after_a_restart(reopen):
    storage = reopen()
    storage.forget()
    storage = reopen()
    storage.write(0, block(1), content(1), storage.generation)
    storage = reopen()
    storage.forget()
    storage.purge()

    assert not reopen().blocks


def test_blocks_of_another_model_are_never_found(reopen):
    reopen().write(0, block(1), content(1), 0)
    found = {}
    with contextlib.suppress(errors.ConfigError):  # a file is refused by name
        found = reopen({**OURS, "model": "other"}).blocks

    assert not found


@needs_obstore
def test_two_workers_share_a_prefix(tmp_path):
    first = open_objects(tmp_path / "shared", OURS)
    first.write(0, block(1), content(1), 0)
    second = open_objects(tmp_path / "shared", OURS)
    assert read(second, 0) == 1
    first.write(0, block(2), content(2), 0)  # evicts block 1

    assert read(second, 0) is None
    second.write(0, block(3), content(3), 0)
    assert read(first, 0) == 2


@needs_obstore
def test_object_whose_write_ends_after_all_was_forgotten_is_removed(tmp_path, monkeypatch):
    storage, put = open_objects(tmp_path / "cache", OURS), obstore.put

    def forget_meanwhile(*args, **options):
        storage.forget()
        return put(*args, **options)

    monkeypatch.setattr(obstore, "put", forget_meanwhile)
    with pytest.raises(OSError, match="all blocks were forgotten"):
        storage.write(0, block(1), content(1), 0)

    assert not open_objects(tmp_path / "cache", OURS).blocks


@needs_obstore
def test_all_is_forgotten_at_once_though_the_store_hangs(tmp_path, monkeypatch):
    storage = open_objects(tmp_path / "cache", OURS)
    storage.write(0, block(1), content(1), 0)
    for name in ("list", "delete"):  # the engine's thread forgets: it must not ask the store
        monkeypatch.delattr(obstore, name)
    storage.forget()

    assert read(storage, 0) is None


@needs_obstore
def test_only_the_owner_can_read_objects_in_a_directory(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    storage = open_objects(tmp_path / "cache", OURS)
    storage.write(0, block(1), content(1), 0)
    (path,) = (tmp_path / "cache").rglob("*-*-*")

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@needs_obstore
def test_more_objects_than_slots_are_removed_at_the_start(tmp_path):
    for name in range(1, 4):
        other = object_storage.ObjectStorage(
            tmp_path.as_uri(), OURS, num_slots=2 * NUM_SLOTS, part="x"
        )
        for slot in range(2):
            other.write(len(other.blocks) + slot, block(10 * name + slot), content(1), 0)
    storage = object_storage.ObjectStorage(tmp_path.as_uri(), OURS, num_slots=NUM_SLOTS, part="x")

    assert len(storage.blocks) == NUM_SLOTS
    assert len(list(tmp_path.rglob("*-*-*"))) == NUM_SLOTS


@needs_obstore
def test_damaged_or_foreign_object_is_not_believed(tmp_path):
    storage = open_objects(tmp_path / "cache", OURS)
    storage.write(0, block(1), content(1), 0)
    (path,) = (tmp_path / "cache").rglob("*-*-*")
    whole = path.read_bytes()
    for damaged in (
        whole[:-1] + b"!",  # a wrong byte
        whole[:-1],  # cut
        b"another\0" + whole[8:],  # another format
    ):
        path.write_bytes(damaged)
        assert read(storage, 0) is None
    path.with_name("notes.txt").write_text("nothing of ours")
    path.with_name("a-b-zz").write_text("nothing of ours")

    assert len(open_objects(tmp_path / "cache", OURS).blocks) == 1


@needs_obstore
def test_absent_store_is_refused_at_start_and_named(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports.reserve()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(errors.ConfigError, match="--kvbm-object-store s3://none/x: expected a"):
        object_storage.ObjectStorage("s3://none/x", OURS, num_slots=1)


@needs_obstore
def test_failing_store_is_an_error_of_the_system(tmp_path, monkeypatch):
    storage = open_objects(tmp_path / "cache", OURS)
    storage.write(0, block(1), content(1), 0)

    def fail(*args, **options):
        raise obstore.exceptions.GenericError("no answer\ndump of a value")

    for name in ("put", "get", "list"):
        monkeypatch.setattr(obstore, name, fail)
    for call in (
        lambda: storage.write(1, block(2), content(2), 0),
        lambda: read(storage, 0),
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
    storage.write(0, block(1), content(1), 0)
    s3.fault = fault
    began_at = time.monotonic()
    with pytest.raises(OSError, match=r"."):
        read(storage, 0)

    assert time.monotonic() - began_at < PATIENT_S
    s3.fault = None
    assert read(storage, 0) == 1  # the block was not lost


@needs_moto
def test_wrong_byte_from_a_store_is_found(s3, tmp_path):
    storage = open_bucket(tmp_path, OURS)
    storage.write(0, block(1), content(1), 0)
    s3.fault = "damages"

    assert read(storage, 0) is None
