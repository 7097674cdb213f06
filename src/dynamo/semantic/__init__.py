"""The semantic router: which model answers a request, with which prompt, and whether it may pass."""
