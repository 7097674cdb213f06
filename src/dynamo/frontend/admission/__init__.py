"""Admission of requests: API keys and their rate limits, busy workers, waiting queues. All of it is off by default."""
