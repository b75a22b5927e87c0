"""Functions that would be the answer, or hide the traffic that is to be counted, by the tasks that they would spoil."""

COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather",
        "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather_object",
        "broadcast_object_list", "all_reduce_coalesced", "all_gather_coalesced", "scatter_object_list",
    )
)  # fmt: skip
SERVER = tuple(
    f"ddp_course.stage3_paramserver.{name}"
    for name in ("average_on_server", "collect_and_return", "broadcast_parameters")
)
RING = tuple(
    f"ddp_course.stage4_ring.{name}"
    for name in ("ring_all_reduce", "whole_gradient_ring", "reduce_scatter", "allgather", "average_on_ring")
)
