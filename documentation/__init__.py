"""Makes the documentation's site and the pages that follow from the code; nothing of it is installed."""
