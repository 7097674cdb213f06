"""The adapter for vLLM's `AsyncLLM`, whose scheduler and model run in processes of their own: tokens in, tokens out."""
