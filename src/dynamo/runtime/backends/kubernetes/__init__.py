"""The API of a Kubernetes cluster: one connection, and discovery over it."""
