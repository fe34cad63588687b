"""Calls the native CPU kernels: a small C++ library behind ctypes, built with the package where there is a compiler."""
