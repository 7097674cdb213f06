"""TensorRT-LLM: tokens in, tokens out, by its `LLM` (PyTorch backend). Written against the LLM API of 1.2, not run here."""
