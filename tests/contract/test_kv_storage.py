"""What every storage below host memory promises: blocks come back whole or not at all, also after a restart."""

import contextlib
import importlib.util

import pytest

import ports
from dynamo.base import errors
from dynamo.kvbm import disk_file
from dynamo.kvbm.tiers import CachedBlock

SIZE, NUM_SLOTS = 8192, 4
OURS = {"model": "m", "dtype": "float32"}
HAS_OBSTORE = importlib.util.find_spec("obstore") is not None
needs_obstore = pytest.mark.skipif(not HAS_OBSTORE, reason="obstore is not installed")
if HAS_OBSTORE:
    import obstore

    from dynamo.kvbm import object_storage


def content(name):
    return memoryview(bytearray(name.to_bytes(8, "little") * (SIZE // 8)))


def block(name):
    return CachedBlock(name, name + 1, name - 1 if name > 1 else None)


def open_file(directory, fingerprint):
    return disk_file.DiskFile(directory, fingerprint, block_bytes=SIZE, num_slots=NUM_SLOTS)


def open_objects(directory, fingerprint):
    directory.mkdir(exist_ok=True)
    return object_storage.ObjectStorage(directory.as_uri(), fingerprint, num_slots=NUM_SLOTS)


@pytest.fixture(params=[open_file, pytest.param(open_objects, marks=needs_obstore)])
def reopen(request, tmp_path):
    """Open the storage in one place; the one that was open is closed."""
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
    assert not reopen().blocks


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
        storage.forget,
    ):
        with pytest.raises(OSError, match=r"^no answer$"):
            call()
