"""Cores and devices of one machine, handed out to child processes so that no two get the same.

An allocation is a value: the caller puts it into a `ChildSpec` and releases it when the child is not restarted.
"""  # decider

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.base import errors

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Allocation:
    """CPU cores by number and GPUs by CUDA's name; empty: not restricted."""

    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that restrict a child to its devices."""
        return {DEVICES_VARIABLE: ",".join(self.devices)} if self.devices else {}


class Allocator:
    """The cores and devices of one machine that are free."""

    def __init__(self, machine: Allocation) -> None:
        self._machine = machine
        self._cores = list(machine.cores)
        self._devices = list(machine.devices)

    def acquire(self, *, num_cores: int = 0, num_devices: int = 0) -> Allocation:
        """Take so many of the free ones, the lowest first. Raises ConfigError if there are fewer."""
        if num_cores > len(self._cores) or num_devices > len(self._devices):
            raise errors.ConfigError(
                f"expected {num_cores} free cores and {num_devices} free devices, got {len(self._cores)} of"
                f" {len(self._machine.cores)} cores and {len(self._devices)} of {len(self._machine.devices)}"
                " devices: start fewer workers, or give each fewer"
            )
        allocation = Allocation(tuple(self._cores[:num_cores]), tuple(self._devices[:num_devices]))
        del self._cores[:num_cores], self._devices[:num_devices]
        return allocation

    def release(self, allocation: Allocation) -> None:
        """Give an allocation back; it is the last that is acquired again."""
        self._cores += allocation.cores
        self._devices += allocation.devices
