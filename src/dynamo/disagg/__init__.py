"""Disaggregated prefill: which worker computes a prompt, and how its KV blocks get to the worker that answers."""
