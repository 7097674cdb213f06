"""Graphs: which services are started together."""
