"""Triton kernels, each with its launcher: CUDA devices run them compiled, Triton's interpreter runs them anywhere."""
