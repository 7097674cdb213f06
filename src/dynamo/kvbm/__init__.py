"""KV blocks: the pool of one engine, export to and import from other engines, and the tiers below device memory."""
