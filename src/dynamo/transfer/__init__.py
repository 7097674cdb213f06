"""How KV blocks move between workers; `api` is the seam, `agent` what a worker holds."""
