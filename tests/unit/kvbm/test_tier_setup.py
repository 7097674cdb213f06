"""Which tiers the options name."""

import itertools
import json
import sys

import pytest

from dynamo.base import config, errors
from dynamo.kvbm import pool as pools
from dynamo.kvbm import storage, tier_setup
from dynamo.protocols import kv_events


def read(*argv, **environ):
    return config.load(tier_setup.KvbmConfig, prog="worker", argv=argv, environ=environ)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), ()),
        (("--connector", "kvbm"), (kv_events.HOST,)),
        (("--connector", "kvbm", "--kvbm-storage-tiers", "hbm"), ()),
        (
            ("--connector", "kvbm", "--kvbm-storage-tiers", "hbm,host_dram,nvme_ssd", "--kvbm-nvme-path", "/x"),
            (kv_events.HOST, kv_events.DISK),
        ),
        (("--connector", "kvbm", "--kvbm-nvme-path", "/x"), (kv_events.HOST, kv_events.DISK)),
        (("--connector", "kvbm", "--kvbm-object-store", "s3://b"), (kv_events.HOST, kv_events.REMOTE)),
    ],
)  # fmt: skip
def test_tiers_follow_from_the_flags(argv, expected):
    assert read(*argv).tier_names == expected


def test_sizes_are_read_from_the_originals_variables():
    settings = read(
        DYN_KVBM_CPU_CACHE_GB="4",
        DYN_KVBM_DISK_CACHE_GB="20",
        DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="7",
        DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS="9",
        DYN_KVBM_DISK_CACHE_DIR="/fast",
    )

    assert (settings.kvbm_cpu_cache_gb, settings.kvbm_disk_cache_gb) == ("4", "20")
    assert settings.kvbm_cpu_cache_override_num_blocks == 7
    assert settings.kvbm_disk_cache_override_num_blocks == 9
    assert settings.kvbm_nvme_path == "/fast"


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ("host_dram", "hbm first"),
        ("hbm,nvme_ssd", "needs host_dram"),
        ("hbm,tape", "got 'tape'"),
        ("hbm,object_store", "needs host_dram"),
        ("hbm,host_dram,object_store", "expected --kvbm-object-store"),
    ],
)
def test_impossible_tiers_are_refused(tiers, expected):
    with pytest.raises(errors.ConfigError, match=expected):
        _ = read("--connector", "kvbm", "--kvbm-storage-tiers", tiers).tier_names


def test_disk_and_object_store_together_are_refused():
    with pytest.raises(errors.ConfigError, match="takes the place of nvme_ssd"):
        _ = read("--kvbm-nvme-path", "/x", "--kvbm-object-store", "s3://b").storage_tiers


def test_object_store_without_its_library_names_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "dynamo.kvbm.object_storage", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    settings = read("--kvbm-object-store", "file:///x", "--kvbm-cpu-cache-override-num-blocks", "1")
    with pytest.raises(
        errors.ConfigError, match="--kvbm-object-store needs obstore, which is not installed"
    ):
        tier_setup.open_storage(
            settings, block_size=16, block_bytes=4096, device_bytes=0, fingerprint={}
        )


@pytest.mark.parametrize(
    ("num_host", "num_disk", "expected"), [(2, 3, "tier host, got 2"), (3, 2, "tier disk, got 2")]
)
def test_tiers_without_a_block_for_each_sharing_worker_are_refused(
    tmp_path, num_host, num_disk, expected
):
    settings = read(
        "--kvbm-sharing-workers", "3",
        "--kvbm-shared-memory-dir", str(tmp_path / "memory"),
        "--kvbm-cpu-cache-override-num-blocks", str(num_host),
        "--kvbm-nvme-path", str(tmp_path / "disk"),
        "--kvbm-disk-cache-override-num-blocks", str(num_disk),
    )  # fmt: skip
    with pytest.raises(errors.ConfigError, match=expected):
        tier_setup.open_storage(
            settings, block_size=16, block_bytes=4096, device_bytes=0, fingerprint={}
        )


def test_offload_ratio_is_a_share():
    with pytest.raises(errors.ConfigError, match="0 to 1"):
        read("--kvbm-offload-ratio", "1.5")


def test_size_without_the_connector_is_warned_of(caplog):
    settings = read(DYN_KVBM_CPU_CACHE_GB="4")

    assert tier_setup.open_tiers(settings, None, None, pools.BlockPool(4), {}) is None
    assert "no effect without --connector kvbm" in caplog.text
    assert "--kvbm-cpu-cache-gb" in caplog.text


@pytest.mark.parametrize(("tiers", "is_warned"), [("hbm,host_dram", True), ("hbm", False)])
def test_tiers_without_the_connector_are_warned_of(tiers, is_warned, caplog):
    settings = read("--kvbm-storage-tiers", tiers)

    assert tier_setup.open_tiers(settings, None, None, pools.BlockPool(4), {}) is None
    assert (f"--kvbm-storage-tiers {tiers}" in caplog.text) == is_warned


def test_options_of_a_tier_that_is_not_listed_are_warned_of(caplog):
    settings = read(
        "--connector", "kvbm", "--kvbm-storage-tiers", "hbm,host_dram", "--kvbm-nvme-path", "/x",
        "--kvbm-object-store", "s3://b", "--kvbm-cpu-cache-override-num-blocks", "2",
    )  # fmt: skip
    storage = tier_setup.open_storage(
        settings, block_size=16, block_bytes=4096, device_bytes=0, fingerprint={}
    )

    assert storage.disk is None
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "--kvbm-nvme-path, --kvbm-object-store"
    ]


def write_checkpoint(directory, matrices, name="model.safetensors"):
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    ends = list(itertools.accumulate(map(len, matrices)))
    header = {str(i): {"data_offsets": [end - len(matrices[i]), end]} for i, end in enumerate(ends)}
    encoded = json.dumps({"__metadata__": {}} | header).encode()
    content = len(encoded).to_bytes(8, "little") + encoded + b"".join(matrices)
    (directory / name).write_bytes(content)
    return tier_setup.identify_model(directory)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_checkpoint_with_one_other_matrix_is_another_model(tmp_path, name):
    matrices = [bytes([i]) * 40_000 for i in range(64)]
    original = write_checkpoint(tmp_path / "original", matrices, name)

    assert write_checkpoint(tmp_path / "copy", matrices, name) == original
    for i in (2, 31, 62):
        edited = [*matrices[:i], b"\xff" * 40_000, *matrices[i + 1 :]]
        assert write_checkpoint(tmp_path / str(i), edited, name) != original


def test_small_and_empty_files_of_weights_are_identified(tmp_path):
    names = {
        write_checkpoint(tmp_path / str(i), matrices)
        for i, matrices in enumerate(([], [b""], [b"a"], [b"b"]))
    }
    (tmp_path / "0" / "empty.bin").touch()

    assert len(names | {tier_setup.identify_model(tmp_path / "0")}) == 5


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_file_beside_the_weights_need_not_be_what_its_name_says(tmp_path, content):
    original = write_checkpoint(tmp_path / "model", [b"a"])
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(content)

    assert tier_setup.identify_model(tmp_path / "model") != original


def test_broken_link_and_directory_with_names_of_weights_are_no_weights(tmp_path):
    """As in a hub's cache from which the large files that no engine reads were removed by hand."""
    original = write_checkpoint(tmp_path / "model", [b"a"])
    (tmp_path / "model" / "pytorch_model.bin").symlink_to(tmp_path / "removed")
    (tmp_path / "model" / "earlier.pt").mkdir()

    assert tier_setup.identify_model(tmp_path / "model") == original


@pytest.mark.parametrize(
    "content", [bytes(4096), b"\x02" + bytes(7) + b"{}", b"\x09" + bytes(7) + b"[1, 2, 3]"]
)
def test_half_downloaded_weights_beside_the_others_do_not_stop_the_start(tmp_path, content):
    """A download that reserves its room first leaves zeros where the head of the file is to be."""
    original = write_checkpoint(tmp_path / "model", [b"a"])
    (tmp_path / "model" / "other.safetensors").write_bytes(content)

    assert tier_setup.identify_model(tmp_path / "model") != original


def test_host_tier_is_closed_again_if_the_disk_is_refused(tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    disk.mkdir()
    (disk / storage.FILE_NAME).write_bytes(b"not ours")
    settings = read(
        "--kvbm-sharing-workers", "2",
        "--kvbm-shared-memory-dir", str(memory),
        "--kvbm-cpu-cache-override-num-blocks", "2",
        "--kvbm-nvme-path", str(disk),
        "--kvbm-disk-cache-override-num-blocks", "2",
    )  # fmt: skip
    with pytest.raises(errors.ConfigError, match="something else than KV blocks"):
        tier_setup.open_storage(
            settings, block_size=16, block_bytes=4096, device_bytes=0, fingerprint={}
        )

    assert list(memory.iterdir()) == []
