"""Adapters for engines of other projects: only translation, no decisions about requests."""
