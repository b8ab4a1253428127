import os

# Triton 3.9 warns where this is unset, and 3.10 will not contract a·b + c by itself any more.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
