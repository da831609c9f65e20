# Untyped stub of megatron-core's package. Without it, the type checker would find only this repository's folder of the
# same name, which has no __init__.py.
from typing import Any

def __getattr__(name: str) -> Any: ...
