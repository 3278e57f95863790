"""Two processes of torch.distributed on a CPU, for a function at module level."""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(function: Callable[..., None], *args: Any, ranks: int = 2) -> None:
    """Runs `function(rank, *args)` in `ranks` processes; raises what one of them raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_main, (ranks, port, function, args), nprocs=ranks)


def _main(rank: int, ranks: int, port: int, function: Callable[..., None], args: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        function(rank, *args)
    except BaseException:
        traceback.print_exc()
        raise
    dist.barrier()
    # Not through the interpreter's end: threads of gloo that are still there then abort a process that has done its work.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
