"""KServe's v2 inference protocol over HTTP and gRPC."""
