"""What is written down of single requests, if the operator wants it."""
