"""Triton kernels. Nothing is imported here: Triton comes with torch's CUDA builds, and may be missing elsewhere."""
