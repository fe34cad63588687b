"""Divides a model among processes that compute each step together: tensor parallelism (Shoeybi et al., 2019, arXiv
1909.08053).
"""
