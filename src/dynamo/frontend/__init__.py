"""The HTTP server in front of the workers, with the APIs of OpenAI, Anthropic and KServe."""
