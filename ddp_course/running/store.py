"""The key-value store through which the ranks of a job find each other."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def serve_store_on(listener: socket.socket, patience: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """Serve a store on a bound socket, and on no other address: two jobs never clash."""
    host, port = listener.getsockname()[:2]
    own: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, timeout=patience, **own)
