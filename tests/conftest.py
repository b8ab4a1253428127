"""Triton kernels run natively where there is a GPU, and under Triton's interpreter where there is none."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
