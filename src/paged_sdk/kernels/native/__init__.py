"""Calls the native CPU kernels: a C++ library, bound by ctypes and built with the package if there is a compiler."""
