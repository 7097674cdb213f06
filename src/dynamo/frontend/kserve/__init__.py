"""KServe's v2 protocol (the Open Inference Protocol), over HTTP and over gRPC: text in, text out, as tensors."""
