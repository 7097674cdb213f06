"""A Kubernetes cluster for a laptop: an API server in memory, its controllers, and a kubelet of local processes."""
