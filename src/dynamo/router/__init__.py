"""The router: selects the worker for each request, by cached prefixes and by load."""
