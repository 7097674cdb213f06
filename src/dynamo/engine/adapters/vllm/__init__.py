"""The adapter for vLLM's `AsyncLLM`: tokens in, tokens out. Its scheduler and model run in processes of their own."""
