"""What the router's decisions would bring: the same deciders, made-up workers, and no waiting for the clock."""
