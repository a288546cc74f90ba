"""The operations that torch runs, by name."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

COPIES = frozenset({"aten.lift_fresh.default", "aten._to_copy.default", "aten.copy_.default"})
"""Operations that can copy from the host to a device."""


class Operations(TorchDispatchMode):
    """Context in which the names of all operations are kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))
