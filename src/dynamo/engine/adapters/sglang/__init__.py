"""The adapter for SGLang's `Engine`: tokens in, tokens out. Written after its sources (0.5.23), not run here."""
