"""Holds Triton kernels and their launchers: CUDA devices run them compiled, Triton's interpreter runs them anywhere."""
