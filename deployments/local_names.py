"""The header `Host` of requests to servers on the loopback interface."""

from collections.abc import Collection

from deployments.config.keys import is_loopback

_UNSPECIFIED = ("0.0.0.0", "::")


def names_this_machine(host: str, names: Collection[str] = ()) -> bool:
    """Whether a `Host`, with or without a port, is a loopback name or address, or one of `names`.

    `0.0.0.0` and `::` lead to this machine, too: some clients are given the address of a listener.

    Browsers let a page reach a loopback server under the page's own name once that name resolves to
    a loopback address (DNS rebinding). Only `Host` then tells that the request is not for it.
    """
    name, _, port = host.strip().rpartition(":")
    if not port.isdecimal() or name.endswith(":"):
        name = host.strip()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    name = name.lower().removesuffix(".")
    is_own = is_loopback(name) or name in _UNSPECIFIED or name.endswith(".localhost")
    return is_own or name in names
