"""The page of the console and its API under `/console/api`."""
