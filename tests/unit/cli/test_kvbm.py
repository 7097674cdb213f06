"""`dynamo kvbm` on the file of a disk tier."""

import os

import pytest

from dynamo.base import errors
from dynamo.cli import kvbm
from dynamo.kvbm import storage, tiers

SIZE = 4096


@pytest.fixture
def directory(tmp_path):
    file = storage.DiskFile(tmp_path, {"model": "m"}, block_bytes=SIZE, num_slots=4)
    for slot in range(3):
        block = tiers.CachedBlock(slot, slot, None)
        file.write(slot, (block,), (memoryview(bytearray([slot] * SIZE)),), 0)
    file.close()
    return tmp_path


def run(action, directory):
    return kvbm.run(kvbm.KvbmCommandConfig(action=action, directory=str(directory)))


def test_ls_names_the_model_and_counts_blocks(directory, capsys):
    assert run("ls", directory) == 0
    said = capsys.readouterr().out

    assert "3 of 4 blocks" in said
    assert "model: m" in said


def test_verify_counts_damaged_blocks(directory, capsys):
    assert run("verify", directory) == 0
    with (directory / storage.FILE_NAME).open("r+b") as file:
        file.seek(2 * storage.PAGE_BYTES + SIZE)
        file.write(b"damaged")

    assert run("verify", directory) == 1
    assert "2 blocks are intact, 1 are not" in capsys.readouterr().out


def test_verify_counts_blocks_that_a_file_cut_short_has_lost(directory, capsys):
    path = directory / storage.FILE_NAME
    whole = path.stat().st_size
    os.truncate(path, whole - 2 * SIZE - 1)

    assert run("verify", directory) == 1
    assert "1 blocks are intact, 2 are not" in capsys.readouterr().out
    assert path.stat().st_size == whole


def test_clear_forgets_all_blocks(directory, capsys):
    run("clear", directory)
    run("ls", directory)

    assert "0 of 4 blocks" in capsys.readouterr().out


def test_directory_without_a_file_is_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match="has no"):
        run("ls", tmp_path)


def test_file_that_a_worker_uses_is_refused(directory):
    used = storage.open_stored(directory)
    with pytest.raises(errors.ConfigError, match="in use by another process"):
        run("clear", directory)
    used.close()
