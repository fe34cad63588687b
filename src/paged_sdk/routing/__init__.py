"""Send requests to one of several replicas: to the one that has most of a prompt in its prefix cache, unless it is
busier than that is worth.
"""

from paged_sdk.routing.router import Route, Router

__all__ = ["Route", "Router"]
