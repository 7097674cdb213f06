"""Prefill here, decode there: who computes a prompt, and how its blocks get to who answers."""
