"""By NIXL, NVIDIA's transfer library, over UCX: `backend` is the way, `endpoint` the only door to the library."""
