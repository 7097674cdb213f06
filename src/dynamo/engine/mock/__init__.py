"""The mock engine: it answers with a cycle of tokens, at the speed of a simulated GPU."""
