# megatron-core's package, untyped. Without this, the type checker takes this repository's folder of the same name,
# which has no __init__.py, for the whole of it.
from typing import Any

def __getattr__(name: str) -> Any: ...
