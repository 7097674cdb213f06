"""The models that are served: who serves them, from what, and where their prompts can be computed."""
