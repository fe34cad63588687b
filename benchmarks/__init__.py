"""Measure speed, memory and quality of this project beside its peers: see docs/benchmarks.md."""
