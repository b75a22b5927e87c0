"""The key-value store through which the ranks of a job find each other."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(minutes=5)


def serve_store(host: str, port: int = 0, patience: timedelta = PATIENCE) -> dist.TCPStore:
    """Serve a store at `port` (0: any free one) of `host`, an address of this machine, and on no other address."""
    return serve_store_on(socket.create_server((host, port), backlog=1024), patience)


def serve_store_on(listener: socket.socket, patience: timedelta) -> dist.TCPStore:
    """Serve a store on a bound socket, so that two jobs never clash."""
    host, port = listener.getsockname()[:2]
    own: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, timeout=patience, **own)
