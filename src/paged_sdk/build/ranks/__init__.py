"""Start, join and watch the processes that hold a model together."""
