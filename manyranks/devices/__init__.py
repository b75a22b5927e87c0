"""The device that each rank gets, and emulated accelerators for machines that have none.

As `Link` emulates cables, `Device` emulates accelerators: the arithmetic is real, and only its
*time* is emulated.

    launch(fn, device=Device("2GFLOP/s"), link=Link("100Mbit"), world_size=4)
        every rank has such a device
    launch(fn, device=[Device("2GFLOP/s")] * 3 + [Device("1GFLOP/s")])
        rank 3 is a straggler
    Device("A100")
        a known accelerator

    with Device("2GFLOP/s", memory="5GB/s").emulate(record=True) as emulation:
        in this process, without ranks
        train(model, batches, lr)
    emulation.operations        what each operation cost, and whether it was bound by flops or by
                                memory
    emulation.busy_s            the seconds in which the device worked; with `sleep=False` no thread
                                waits for it
"""

from .device import Device
from .emulation import Emulation, device_number, full_speed
from .placement import placement, rank_device

__all__ = ["Device", "Emulation", "device_number", "full_speed", "placement", "rank_device"]
