"""Directories, secrets and sockets that other users of the host cannot use."""

import os
import socket
import stat

import pytest

from dynamo.base import errors, local_users


def test_missing_levels_are_made_for_this_user_only(tmp_path):
    local_users.make_private_directory(tmp_path / "a" / "b")

    assert [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("a", "a/b")] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_directory_that_others_may_write_is_refused(tmp_path, mode):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(errors.ConfigError, match="may be written by other users: chmod go-w"):
        local_users.make_private_directory(tmp_path / "kv")


def test_directory_below_one_that_others_may_write_is_refused(tmp_path):
    shared = tmp_path / "shared"
    (shared / "kv").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(errors.ConfigError, match=f"its level {shared} may be written"):
        local_users.make_private_directory(shared / "kv")


def test_directory_below_a_sticky_one_is_used(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    local_users.make_private_directory(shared / "kv")

    assert (shared / "kv").is_dir()


def test_level_of_another_user_is_refused(tmp_path, monkeypatch):
    owner, stranger = os.getuid(), os.getuid() + 1
    (tmp_path / "kv").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(errors.ConfigError, match=f"user {owner}, expected {stranger}: set DYN_"):
        local_users.make_private_directory(tmp_path / "kv")


def test_directory_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    with pytest.raises(errors.ConfigError, match="is a symbolic link: set DYN_FILE_KV"):
        local_users.make_private_directory(tmp_path / "kv")


def test_link_where_others_may_put_one_is_not_followed(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "real").mkdir()
    (shared / "link").symlink_to(tmp_path / "real")
    with pytest.raises(errors.ConfigError, match=r"its level .*link is a symbolic link"):
        local_users.make_private_directory(shared / "link" / "kv")


def test_secret_is_made_once_and_readable_by_this_user_only(tmp_path):
    path = tmp_path / "token"
    first, second = local_users.share_secret(path), local_users.share_secret(path)

    assert first == second
    assert len(first) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["token"]


def test_lost_secret_is_put_back_as_proposed(tmp_path):
    assert local_users.share_secret(tmp_path / "token", b"as before") == b"as before"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_secret_that_others_may_read_is_refused(tmp_path, mode):
    (tmp_path / "token").write_bytes(b"secret")
    (tmp_path / "token").chmod(mode)
    with pytest.raises(errors.ConfigError, match="remove the file, and it is made anew"):
        local_users.share_secret(tmp_path / "token")


def test_secret_that_is_a_link_or_a_pipe_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OSError, match="symbolic links"):
        local_users.share_secret(tmp_path / "link")
    with pytest.raises(errors.ConfigError):
        local_users.share_secret(tmp_path / "pipe")


def test_user_at_the_other_end_of_a_socket_is_known():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert local_users.peer_uid(ours) == os.getuid()
