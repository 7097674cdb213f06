"""The device of tests whose KV cache is not in host memory: a GPU, or where there is none the CPU in its place."""

import torch

DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu:0"
)  # "cpu" is the one whose memory the engine shares
