"""llama.cpp as an engine: GGUF files, on a laptop's processor or GPU."""
