"""The model registry: the models that can be served, the instances that serve them, and the files they need."""
