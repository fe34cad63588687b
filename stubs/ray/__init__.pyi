"""What is called of Ray, which is an extra that checking types does not need."""

from typing import Any

class RuntimeContext:
    def get_assigned_resources(self) -> dict[str, float]: ...

def init(
    *,
    num_cpus: int | None = None,
    object_store_memory: int | None = None,
    include_dashboard: bool | None = None,
    logging_level: str = "info",
    log_to_driver: bool = True,
    _temp_dir: str | None = None,
) -> Any: ...
def is_initialized() -> bool: ...
def shutdown() -> None: ...
def cluster_resources() -> dict[str, float]: ...
def get_runtime_context() -> RuntimeContext: ...
