"""Holds Triton kernels and their launchers. They run compiled on CUDA devices, or anywhere in Triton's interpreter."""
