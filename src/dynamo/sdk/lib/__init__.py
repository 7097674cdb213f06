"""The modules of NVIDIA Dynamo's SDK of 0.3 from which graphs import names of `dynamo.sdk`."""
