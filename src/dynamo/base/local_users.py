"""The protection against other users of the same host: private directories, a secret in one, and the user of a socket.

A directory is private if no other user could have made it, can write to it, or can put another in its place: every
level of its path belongs to this user or to root and may be written by others only with the sticky bit, as `/tmp`. A
symbolic link is followed only where nobody but root could have put it, as `/var/run`.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import stat
import struct
import tempfile
from pathlib import Path

from dynamo.base import errors

_MAX_LINKS = 40
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OPEN_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe that blocks
_MAX_SECRET_BYTES = 4096
_PEER_CREDENTIALS = struct.Struct("iII")  # process, user, group


def make_private_directory(path: Path) -> None:
    """Create a directory and its missing parents for this user only, and check every level of its path.

    Raises ConfigError for a level that another user could change, OSError if the disk refuses it.
    """
    path = Path(os.path.abspath(path))
    level, remaining = Path(path.anchor), list(path.parts[1:])
    num_links, is_guarded = 0, _is_roots_own(os.lstat(level))
    while remaining:
        level /= remaining.pop(0)
        try:
            status = os.lstat(level)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another process was quicker
                level.mkdir(mode=0o700)
            status = os.lstat(level)
        if stat.S_ISLNK(status.st_mode):
            num_links += 1
            if not (remaining and is_guarded and status.st_uid == 0) or num_links > _MAX_LINKS:
                raise _refusal(path, level, "is a symbolic link")
            target = Path(os.path.abspath(level.parent / os.readlink(level)))
            level, remaining = Path(target.anchor), [*target.parts[1:], *remaining]
            is_guarded = _is_roots_own(os.lstat(level))
            continue
        if (fault := _fault_of_level(status, is_last=not remaining)) is not None:
            raise _refusal(path, level, fault)
        is_guarded = is_guarded and _is_roots_own(status)


def _is_roots_own(status: os.stat_result) -> bool:
    return status.st_uid == 0 and not status.st_mode & _WRITABLE_BY_OTHERS


def _fault_of_level(status: os.stat_result, *, is_last: bool) -> str | None:
    """Return why another user could change a level of a path; None if none could."""
    owners = {os.getuid()} if is_last else {os.getuid(), 0}
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}, expected {os.getuid()}"
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and not is_last
    if status.st_mode & _WRITABLE_BY_OTHERS and not is_sticky:
        return "may be written by other users: chmod go-w, or choose another"
    return None


def _refusal(path: Path, level: Path, reason: str) -> errors.ConfigError:
    place = str(path) if level == path else f"{path}: its level {level}"
    return errors.ConfigError(
        f"discovery directory {place} {reason}: set DYN_FILE_KV to a directory of your own"
    )


def temporary_directory(kind: str, setting: str) -> Path:
    """Return this user's own directory of a kind among the temporary files, for one without a home; it is made here.

    The folder of the temporary files is taken as it is: a volume of Kubernetes lacks the sticky bit, and other users.
    Raises ConfigError, which advises `setting`, for a directory that another user made or can write to.
    """
    try:
        path = Path(tempfile.gettempdir(), f"{kind}-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fault = _fault_of_level(path.lstat(), is_last=True)
    except OSError as error:
        raise errors.ConfigError(
            f"{error}: set {setting} to a directory that we can write"
        ) from error
    if fault is not None:
        raise errors.ConfigError(f"{path} {fault}: set {setting} to a directory of your own")
    return path


def share_secret(path: Path, proposal: bytes | None = None) -> bytes:
    """Return the secret in this file of a private directory; the first process that asks makes it.

    `proposal` is the secret to put there if the file is missing, by default a new one. Raises ConfigError for a file
    that others may read or that is not this user's, OSError if the disk refuses it.
    """
    with contextlib.suppress(FileNotFoundError):
        return _read_secret(path)
    secret = proposal or secrets.token_hex(32).encode()
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_SAFELY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | _OPEN_SAFELY)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
        secret = file.read(_MAX_SECRET_BYTES) if stat.S_ISREG(status.st_mode) else b""
    if not is_private or not secret:
        raise errors.ConfigError(
            f"{path}: expected a secret that only user {os.getuid()} can read: remove the file, and it is made anew"
        )
    return secret


def peer_uid(sock: socket.socket) -> int:
    """Return the user id at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(credentials)[1])


def is_own_user(transport: asyncio.BaseTransport) -> bool:
    """Return whether a process of this user is at the other end of a connection over a Unix socket."""
    return peer_uid(transport.get_extra_info("socket")) == os.getuid()
