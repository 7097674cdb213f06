"""Which worker gets a request: whoever holds its prefix, and is not too busy."""
