"""The Kubernetes operator: custom resources in, Deployments, Services and their like out."""
