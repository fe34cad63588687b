"""Say what the operating system gives: threads, event loops, processors, control groups, files, processes."""
