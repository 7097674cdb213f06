"""One frontend in several processes: they share a port, their metrics and the stored responses."""
