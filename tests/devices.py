"""The device of the native engine in tests: a GPU, if torch sees one."""

import torch

HAS_GPU = torch.cuda.is_available()
COMPUTING = "cuda" if HAS_GPU else "cpu"
# One whose memory other processes cannot read; torch's other name of the CPU is treated as such.
DEVICE = "cuda" if HAS_GPU else "cpu:0"
