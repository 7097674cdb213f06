"""The parts for vLLM."""
