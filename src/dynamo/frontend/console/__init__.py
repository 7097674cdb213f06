"""The console of a frontend: what it keeps for its views, the views, and the events that keep open pages up to date."""
