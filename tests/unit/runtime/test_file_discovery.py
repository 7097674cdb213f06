import asyncio
import errno
import os
import shutil
import threading
from concurrent import futures

import pytest
import watchfiles

from dynamo.base import errors
from dynamo.runtime.backends import file, lease_directory
from dynamo.runtime.discovery import Delete, Put
from waiting import PATIENT_S


@pytest.fixture
async def join(tmp_path):
    """Makes members of one directory; they leave at the end."""
    members = []

    async def make(instance_id):
        members.append(await file.FileDiscovery.open(tmp_path / "kv", instance_id))
        return members[-1]

    yield make
    for member in members:
        await member.close()


async def take(watch):
    async with asyncio.timeout(PATIENT_S):
        return await anext(watch)


async def test_a_change_is_told_long_before_the_next_poll(join, monkeypatch):
    monkeypatch.setattr(file, "POLL_S", 60)
    a, b = await join(1), await join(2)
    watch = b.watch("k")
    await a.put("k", b"before")
    before = await take(watch)
    told = asyncio.ensure_future(take(watch))
    while not told.done():  # until the notifier has begun, it hears nothing
        await a.put("k", b"after")
        await asyncio.wait((told,), timeout=0.05)
        await a.put("k", b"later")

    assert before == Put(key="k", value=b"before")
    assert (await told).value in (b"after", b"later")


async def test_without_notifications_polling_does(join, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(errno.EMFILE, "inotify instance limit reached")

    monkeypatch.setattr(watchfiles, "watch", refuse)
    monkeypatch.setattr(file, "POLL_S", 0.01)
    a, b = await join(1), await join(2)
    watch = b.watch("k")
    await a.put("k", b"1")
    first = await take(watch)
    await a.delete("k")

    assert (first, await take(watch)) == (Put(key="k", value=b"1"), Delete(key="k"))
    assert caplog.text.count("no notifications") == 2  # one line for each of the two


async def test_a_directory_that_is_removed_comes_back_with_the_keys(join, tmp_path, monkeypatch):
    monkeypatch.setattr(file, "POLL_S", 0.01)
    a, b = await join(1), await join(2)
    await a.put("a", b"1")
    await b.put("b", b"2")
    watch = b.watch("c")
    (tmp_path / "kv").rename(tmp_path / "away")
    async with asyncio.timeout(PATIENT_S):
        while await b.get_prefix("") != {"a": b"1", "b": b"2"}:
            pass
    await a.put("c", b"3")

    assert await take(watch) == Put(key="c", value=b"3")


async def test_watch_reports_no_deletion_while_the_disk_fails(join, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(file, "POLL_S", 0.01)
    a, b = await join(1), await join(2)
    await a.put("k", b"1")
    watch = b.watch("")
    assert await take(watch) == Put(key="k", value=b"1")

    scandir, refusals = os.scandir, threading.Semaphore(0)

    def refuse(path):
        refusals.release()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(errors.ConfigError, match="Input/output error"):
        await b.get_prefix("")
    await a.put("k", b"2")
    for _ in range(16):  # between some of them only the leases are read
        await asyncio.to_thread(refusals.acquire, timeout=PATIENT_S)
    monkeypatch.setattr(os, "scandir", scandir)
    await a.put("k", b"3")
    changes = [await take(watch)]
    while changes[-1].value != b"3":
        changes.append(await take(watch))

    assert not [change for change in changes if isinstance(change, Delete)]
    assert 1 <= caplog.text.count("Input/output error") <= 2  # once for each member


async def test_second_member_with_the_same_id_is_refused(join, monkeypatch):
    monkeypatch.setattr("dynamo.runtime.backends.lease_directory._LOCK_RETRY_S", 0)
    await join(1)
    with pytest.raises(errors.ConfigError, match="instance id of its own"):
        await join(1)


async def test_closed_discovery_leaves_no_threads_tasks_or_files(tmp_path):
    threads_before = set(threading.enumerate())
    member = await file.FileDiscovery.open(tmp_path / "kv", 1)
    watch = member.watch("")
    await member.put("k", b"1")
    await take(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    await member.close()
    left = {t.name for t in set(threading.enumerate()) - threads_before}

    assert not [name for name in left if name.startswith("notifier")]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not list((tmp_path / "kv").glob("*/*"))


async def test_key_that_the_disk_keeps_is_no_error_and_is_removed_later(join, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    member = await join(1)
    await member.put("k", b"1")
    with monkeypatch.context() as patched:
        patched.setattr(lease_directory.Path, "unlink", refuse)
        await member.delete("k")

    assert "k stays for now" in caplog.text
    assert await member.get_prefix("") == {}


@pytest.fixture
def refuse_thread(monkeypatch):
    """Let the next thread of this name not start; the event returned is set when it did not."""

    def refuse_one(name):
        start, was_refused = threading.Thread.start, asyncio.Event()

        def start_or_refuse(thread):
            if thread.name.startswith(name) and not was_refused.is_set():
                was_refused.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
        return was_refused

    return refuse_one


async def test_files_are_followed_after_a_moment_without_threads(join, refuse_thread):
    member = await join(1)
    asyncio.get_running_loop().set_default_executor(futures.ThreadPoolExecutor(4, "asyncio"))
    await asyncio.wait_for(refuse_thread("asyncio").wait(), PATIENT_S)
    other = await join(2)
    await other.put("a", b"")
    watch = member.watch("")
    async with asyncio.timeout(PATIENT_S):
        await take(watch)
        await other.put("b", b"")  # only the task that follows the files tells of it

        assert (await take(watch)).key == "b"


async def test_files_are_polled_where_no_thread_is_left_for_notifications(join, refuse_thread):
    refuse_thread("notifier of")
    member, other = await join(1), await join(2)
    watch = member.watch("")
    async with asyncio.timeout(PATIENT_S):
        await other.put("a", b"")

        assert (await take(watch)).key == "a"


async def test_look_that_is_cancelled_leaves_no_notifier_at_a_directory_that_is_gone(
    join, tmp_path
):
    member = await join(1)
    await member._tasks.close()  # nobody looks at the disk but the test
    notifier, restore = member._notifier, member._directory.restore
    has_restored, may_end = threading.Event(), threading.Event()

    def restore_slowly():
        is_replaced = restore()
        has_restored.set()
        may_end.wait(PATIENT_S)
        return is_replaced

    member._directory.restore = restore_slowly
    shutil.rmtree(tmp_path / "kv" / "keys")
    looking = asyncio.create_task(member.get_prefix(""))
    await asyncio.to_thread(has_restored.wait, PATIENT_S)
    looking.cancel()
    may_end.set()
    await asyncio.wait((looking,))
    member._directory.restore = restore
    async with asyncio.timeout(PATIENT_S):
        while member._notifier is notifier:
            await member.get_prefix("")
