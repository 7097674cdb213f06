"""The simulator: the router's own decisions over simulated workers, in virtual time."""
