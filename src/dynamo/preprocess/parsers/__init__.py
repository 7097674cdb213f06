"""Parsers that split the text of an answer, as it grows, into reasoning, tool calls and content."""
