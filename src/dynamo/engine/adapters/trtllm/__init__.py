"""TensorRT-LLM: tokens in, tokens out, by its `LLM` class on PyTorch. Written against the API of 1.2, not run here."""
