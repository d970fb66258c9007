"""The environment variables of ranks with GPUs. What the user has set stays as it is.

CUDA and NCCL read them when a process first uses them, so they must stand in the environment that a rank starts with.
"""

import socket
from collections.abc import Collection, Mapping

__all__ = ["gpu_environment"]

_ALWAYS = {
    # Kernels that wait for messages must not stand in the way of others: by default all streams share 8 queues.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A kernel of CUDA's libraries that is loaded at its first use may wait for all that run, and so for messages, as
    # CUDA's programming guide says of lazy loading.
    "CUDA_MODULE_LOADING": "EAGER",
    # NCCL would tell any user of the machine, at port 28028 of loopback, how its communicators are.
    "NCCL_RAS_ENABLE": "0",
}
# Microbatches have new sizes in each step, which leave gaps in segments of fixed size. Since 2.10 torch reads the first
# name, and the second, an older one, if there is no first.
_ALLOCATOR, _SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"


def gpu_environment(environ: Mapping[str, str], interfaces: Collection[str] | None = None) -> dict[str, str]:
    """What `environ` lacks. `interfaces` are the names of this machine's network interfaces; None looks them up.

    gloo, which carries the messages of checkpoints, uses the interface of NCCL if `NCCL_SOCKET_IFNAME` names one. That
    variable may also name several by how they begin, or those to leave out, which gloo does not understand.
    """
    wanted = dict(_ALWAYS)
    if not any(name in environ for name in _ALLOCATOR):
        wanted[_ALLOCATOR[0]] = _SETTINGS
    named = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    if named in interfaces:
        wanted["GLOO_SOCKET_IFNAME"] = named
    return {name: value for name, value in wanted.items() if name not in environ}
