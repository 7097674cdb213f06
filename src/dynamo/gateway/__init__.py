"""The gateway's side of the semantic router: Envoy's external processing, and the process that serves it."""
