"""Routes requests to replicas: to the one with most of the prompt in its prefix cache, unless its load outweighs the
tokens saved.
"""

from paged_sdk.routing.router import Route, Router

__all__ = ["Route", "Router"]
