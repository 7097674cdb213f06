"""One module per way to reach another process's memory."""
