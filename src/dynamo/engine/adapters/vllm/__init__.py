"""vLLM: tokens in, tokens out, by its `AsyncLLM`, whose scheduler and model run in processes of their own."""
