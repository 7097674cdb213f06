"""vLLM as an engine of ours."""
