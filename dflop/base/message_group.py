"""Process groups that carry messages from rank to rank."""

from datetime import timedelta

import torch
import torch.distributed as dist

from dflop.base.devices import MESSAGE_CTAS

__all__ = ["message_group"]


def message_group(device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of all ranks, for messages. A message that waits for its other end holds few SMs."""
    if device.type != "cuda":
        return dist.new_group(timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = MESSAGE_CTAS
    # With the device of `init_process_group`, the communicator is made at once: an operation of few ranks may be first.
    return dist.new_group(timeout=timeout, pg_options=options)
