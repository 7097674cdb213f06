"""Answers that follow a grammar."""
