"""Run the command line as ``python -m paged_sdk``, where its script is not on the path."""

from __future__ import annotations

from paged_sdk.cli import main

if __name__ == "__main__":
    main()
