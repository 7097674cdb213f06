"""One frontend in several processes: the port, the answers that are kept, and the metrics are theirs together."""
