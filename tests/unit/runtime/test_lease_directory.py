import errno
import logging
import os
import pathlib
import shutil
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.runtime.backends import lease_directory

KEY = "v1/instances/dynamo/backend/generate/1f"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def join(root):
    """Makes members of the directory; they leave at the end."""
    members = []

    def make(name):
        members.append(lease_directory.LeaseDirectory(root, name))
        members[-1].acquire()
        return members[-1]

    yield make
    for member in members:
        member.release()


def abandon(root, key, lease="dead"):
    """What a process that was killed leaves: its keys and its lease, not locked."""
    lease_directory.prepare(root)
    (root / "leases" / lease).touch()
    path = root / "keys" / lease_directory.file_name(key)
    path.write_bytes(b'{"lease":"%s","size":2}\n{}' % lease.encode())
    return path


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=20))
def test_key_is_recovered_from_its_file_name(key):
    name = lease_directory.file_name(key)

    assert lease_directory.key_of(name) == key
    assert name.isascii()
    assert name.replace("%", "").isalnum()


def test_file_name_is_percent_encoded_like_dynamos():
    assert lease_directory.file_name("v1/kv_events-x") == "v1%2Fkv%5Fevents%2Dx"


@pytest.mark.parametrize("key", ["", "x" * 256, "/" * 100])
def test_a_key_that_is_no_file_name_is_refused(join, key):
    with pytest.raises(errors.LocalProtocolError, match="as a file name, expected 1 to"):
        join("a").write(key, b"")


def test_a_value_that_is_too_large_is_refused(join):
    limit = lease_directory.VALUE_LIMIT
    a = join("a")
    a.write(KEY, bytes(limit))
    with pytest.raises(errors.LocalProtocolError, match=f"expected at most {limit}"):
        a.write(KEY, bytes(limit + 1))

    assert a.scan(with_keys=True) == {KEY: bytes(limit)}


def test_directory_is_accessible_only_to_its_user(join, root):
    join("a").write(KEY, b"")

    assert root.stat().st_mode & 0o777 == 0o700
    assert not list(root.glob("keys/.*"))


def test_a_directory_of_another_user_is_refused(root, monkeypatch):
    root.mkdir()
    owner, stranger = os.getuid(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(errors.ConfigError, match=f"user {owner}, expected {stranger}: set DYN_"):
        lease_directory.prepare(root)


def test_world_writable_directory_is_refused(root):
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(errors.ConfigError, match="chmod go-w"):
        lease_directory.prepare(root)


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigError, match="set DYN_FILE_KV"):
        lease_directory.prepare(tmp_path / "file" / "kv")


def test_second_living_owner_of_a_lease_is_refused(join, monkeypatch):
    monkeypatch.setattr(lease_directory, "_LOCK_RETRY_S", 0)
    join("a")
    with pytest.raises(errors.ConfigError, match="give each process an instance id of its own"):
        join("a")


def test_lease_of_a_dead_owner_can_be_acquired_without_its_keys(root, join):
    abandon(root, KEY, "a")
    a = join("a")
    a.write("new", b"1")
    b = join("b")

    assert b.scan(with_keys=True) == {"new": b"1"}
    assert a.scan(with_keys=True) == {"new": b"1"}


def test_keys_of_a_dead_owner_are_hidden_and_removed(root, join):
    path = abandon(root, KEY)
    (root / "keys" / ".new-dead").touch()  # it was about to write
    a = join("a")
    a.write("alive", b"1")

    assert a.scan(with_keys=True) == {"alive": b"1"}
    assert not path.exists()
    assert [os.listdir(root / part) for part in ("keys", "leases")] == [["alive"], ["a"]]


def test_a_look_at_the_leases_alone_finds_the_dead(root, join):
    a, b = join("a"), lease_directory.LeaseDirectory(root, "b")
    b.acquire()
    b.write(KEY, b"1")
    assert a.scan(with_keys=True) == {KEY: b"1"}

    b.release()
    abandon(root, KEY, "b")

    assert a.scan(with_keys=False) == {}


def test_key_without_a_lease_file_is_removed(root, join):
    path = abandon(root, KEY)
    (root / "leases" / "dead").unlink()

    assert join("a").scan(with_keys=True) == {}
    assert not path.exists()


def test_the_living_are_left_alone(join):
    a, b = join("a"), join("b")
    b.write(KEY, b"1")
    for _ in range(3):
        a.scan(with_keys=True)

    assert b.scan(with_keys=True) == {KEY: b"1"}


def test_key_rewritten_by_a_living_owner_survives_the_sweep(root, join):
    abandon(root, KEY)
    reader, heir = lease_directory.LeaseDirectory(root, "reader"), join("heir")
    reader._read_keys()  # it has seen the dead one's file, and not yet that its owner is dead
    heir.write(KEY, b"mine")
    reader.scan(with_keys=False)

    assert heir.scan(with_keys=True) == {KEY: b"mine"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\n", b"null\n", b'{"lease":"a"}\n', b'{"lease":"a","size":9}\nhalf'],
)
def test_malformed_key_file_is_ignored_and_logged_once(root, join, caplog, content):
    a = join("a")
    a.write("good", b"1")
    (root / "keys" / lease_directory.file_name("bad")).write_bytes(content)
    for _ in range(3):
        assert a.scan(with_keys=True) == {"good": b"1"}

    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "ignoring" in caplog.text


def test_directories_links_and_pipes_are_ignored(root, join, caplog):
    a = join("a")
    for parent in (root / "keys", root / "leases"):
        (parent / "directory").mkdir()
        (parent / "link").symlink_to("/etc/passwd")
        os.mkfifo(parent / "pipe")
    fds_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert a.scan(with_keys=True) == {}

    assert len(os.listdir("/proc/self/fd")) == fds_before
    assert "ignoring" in caplog.text
    assert pathlib.Path("/etc/passwd").exists()


def test_consecutive_values_of_equal_size_are_all_read(join):
    a, b = join("a"), join("b")
    seen = []
    for i in range(50):
        a.write(KEY, b"%02d" % i)
        seen.append(b.scan(with_keys=True)[KEY])

    assert seen == [b"%02d" % i for i in range(50)]


def test_owner_restores_removed_keys(root, join):
    a = join("a")
    a.write(KEY, b"1")
    assert a.restore() is False
    for path in (*root.glob("*/*"), *root.glob("*"), root):
        path.rmdir() if path.is_dir() else path.unlink()

    assert a.restore() is True
    assert join("b").scan(with_keys=True) == {KEY: b"1"}


def test_released_owner_restores_no_keys(root, join):
    a = join("a")
    a.write(KEY, b"1")
    a.release()
    a.restore()

    assert not list(root.glob("*/*"))


def test_error_for_a_full_disk_names_the_setting(root, join, monkeypatch):
    a = join("a")

    def refuse(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", refuse)
    with pytest.raises(errors.ConfigError, match=r"No space left on device.*DYN_FILE_KV"):
        a.write(KEY, b"1")


def test_concurrent_sweepers_remove_only_keys_of_dead_owners(root, join):
    sweepers = [join(f"sweeper{i}") for i in range(4)]
    living = join("living")
    living.write("alive", b"1")
    for i in range(30):
        abandon(root, f"dead{i}", f"dead{i}")
    seen, start = [], threading.Barrier(len(sweepers))

    def sweep(sweeper):
        start.wait()
        seen.append(sweeper.scan(with_keys=True))

    threads = [threading.Thread(target=sweep, args=(sweeper,)) for sweeper in sweepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    living.scan(with_keys=True)

    assert seen == [{"alive": b"1"}] * len(sweepers)
    assert os.listdir(root / "keys") == ["alive"]
    assert not [name for name in os.listdir(root / "leases") if name.startswith("dead")]


def test_local_token_is_put_back_as_it_was(root):
    a = lease_directory.LeaseDirectory(root, "a", b"the token of the cluster")
    a.acquire()
    shutil.rmtree(root)
    a.restore()
    a.release()

    assert (root / "token").read_bytes() == b"the token of the cluster"


def test_lock_that_the_file_system_refuses_leaves_no_file_open(root, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    lease_directory.prepare(root)
    monkeypatch.setattr(lease_directory.fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(errors.ConfigError, match="No locks available"):
        lease_directory.LeaseDirectory(root, "1").acquire()

    assert os.listdir("/proc/self/fd") == before


def test_directory_that_is_made_anew_is_another_one_though_it_may_get_the_number_of_the_former(
    root, join
):
    member = join("1")
    shutil.rmtree(root / "keys")

    assert [member.restore(), member.restore()] == [True, False]
