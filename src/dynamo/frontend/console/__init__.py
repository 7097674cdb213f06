"""The console of a frontend: its page and API, what it keeps for its views, the views, and events for open pages."""
