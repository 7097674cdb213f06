"""The disk tier's file, its blocks moved by NIXL's POSIX plugin instead of by us: only for tests and measurements.

It must keep what every storage promises (`tests/contract/test_kv_storage.py`), and `kvbm_copies` compares the two.
"""

import os

import nixl._api as nixl

from dynamo.kvbm import storage
from dynamo.transfer import memory

PLUGIN = "POSIX"


class NixlPosixFile(storage.DiskFile):
    """A `storage.Storage` with an agent of the library, which is used by one thread at a time."""

    num_threads = 1

    def _open(self):
        super()._open()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(f"disk {id(self)}", config)
        self._agent.create_backend(PLUGIN, {})
        num_bytes = self._slots_at + self.num_slots * self._stride
        for fd in {self._fd, self._data_fd}:
            self._agent.register_memory([(0, num_bytes, fd, "")], "FILE", [PLUGIN])

    def _move(self, call, slot, content):
        agent, window = self._agent, memory.Window(content)
        address, length = window.address, len(content)
        is_aligned = not (address | length) % storage.PAGE_BYTES
        fd = self._data_fd if is_aligned else self._fd  # past the page cache only whole pages move
        registered = agent.register_memory([(address, length, 0, "")], "DRAM", [PLUGIN])
        try:
            handle = agent.initialize_xfer(
                "WRITE" if call is os.pwritev else "READ",
                agent.get_xfer_descs([(address, length, 0)], "DRAM"),
                agent.get_xfer_descs([(self._slots_at + slot * self._stride, length, fd)], "FILE"),
                agent.name,
                backends=[PLUGIN],
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        finally:
            agent.deregister_memory(registered, [PLUGIN])
            window.close()
        if state != "DONE":
            raise OSError(f"NIXL's transfer ended as {state}")
