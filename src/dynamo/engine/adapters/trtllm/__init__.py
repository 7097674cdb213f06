"""The adapter for TensorRT-LLM's `LLM` class on PyTorch: tokens in, tokens out. Written for 1.2, not run here."""
