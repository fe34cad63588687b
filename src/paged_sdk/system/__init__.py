"""Wraps the operating system: threads, event loops, processors, cgroups, files, processes."""
