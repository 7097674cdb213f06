"""Cores and devices are handed out once."""

import pytest

from dynamo.base import errors
from dynamo.launch import allocation, children

MACHINE = allocation.Allocation((0, 1, 2, 3), ("4", "GPU-5"))


def test_two_allocations_share_nothing():
    allocator = allocation.Allocator(MACHINE)
    first = allocator.acquire(num_cores=2, num_devices=1)
    second = allocator.acquire(num_cores=1, num_devices=1)

    assert first == allocation.Allocation((0, 1), ("4",))
    assert second == allocation.Allocation((2,), ("GPU-5",))


def test_request_beyond_the_free_ones_is_refused_with_the_numbers():
    allocator = allocation.Allocator(MACHINE)
    allocator.acquire(num_cores=3)

    with pytest.raises(errors.ConfigError, match="got 1 of 4 cores and 2 of 2 devices"):
        allocator.acquire(num_cores=2)


def test_released_allocation_can_be_acquired_again():
    allocator = allocation.Allocator(MACHINE)
    allocator.release(allocator.acquire(num_devices=2))

    assert allocator.acquire(num_devices=2).devices == ("4", "GPU-5")


def test_devices_restrict_a_child_by_its_environment():
    assert MACHINE.environ == {"CUDA_VISIBLE_DEVICES": "4,GPU-5"}
    assert allocation.Allocation().environ == {}


def test_machine_has_the_devices_that_its_environment_names():
    found = children.machine_resources({"CUDA_VISIBLE_DEVICES": "1, GPU-7"})

    assert found.devices == ("1", "GPU-7")
    assert found.cores


@pytest.mark.parametrize(
    ("named", "devices"),
    [
        ("-1", ()),  # hides all of them
        ("NoDevFiles", ()),
        ("2,-1,3", ("2",)),  # as CUDA reads it: only what stands before a name of none
        ("MIG-8,GPU-7", ("MIG-8", "GPU-7")),
        ("", ()),
    ],
)
def test_devices_behind_a_name_of_none_are_hidden(named, devices):
    assert children.machine_resources({"CUDA_VISIBLE_DEVICES": named}).devices == devices
