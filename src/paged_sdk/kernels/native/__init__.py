"""Native CPU kernels: a small C++ library behind ctypes, built with the package where a compiler is."""
