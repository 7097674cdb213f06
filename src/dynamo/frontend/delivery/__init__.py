"""Delivery of answers: from the outputs of workers to the bytes that a client reads."""
