"""Time the CUDA kernels, one module for each: ``run(device)`` returns rows of figures."""
