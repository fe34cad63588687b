"""Speed, memory and quality of this project, measured beside its peers: see docs/benchmarks.md."""
