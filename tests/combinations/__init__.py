"""Draw combinations of settings and requests at random, and compare each answer with the one that it has alone.

``python -m combinations --help`` with this directory's parent on the path; ``make combinations`` runs it.
"""
