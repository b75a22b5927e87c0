"""`ddp-course compare`: the options of the comparison, and what is printed about it."""

import torch

from . import compare
from .running.files import writable_folder


def add_parser(subparsers):
    """Add `compare` to the command line."""
    parser = subparsers.add_parser("compare", help="train with every stage on the same batches and compare")
    parser.add_argument("--problem", default="digits", help="digits, bytes or synthetic (default digits)")
    parser.add_argument("--world-size", type=int, default=4, metavar="K", help="number of ranks (default 4)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: the problem's)")
    parser.add_argument("--stages", default=",".join(compare.DEFAULT_STAGES), help="default %(default)s; 4w and 6 too")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0")
    parser.add_argument("--dtype", default="float32", help="float32 or float64")
    parser.add_argument("--global-batch", type=int, metavar="B", help="samples a step over all ranks together")
    parser.add_argument("--parameters", type=int, metavar="P", help="size of the model of bytes and synthetic")
    parser.add_argument("--bucket-cap-mb", type=float, default=0.25, metavar="M", help="MiB a bucket (default 0.25)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the problem's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    parser.add_argument("--link", default="auto", help='bandwidth (200Mbit without GPUs) or "none"')
    parser.add_argument("--latency", default="0ms", help="one-way delay of the emulated link, such as 2ms")
    parser.add_argument("--link-mode", choices=["auto", "hosts", "wire"], default="auto", help="how links are emulated")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds that a stage may take")
    parser.add_argument(
        "--read", metavar="DIR", help="compare what ddp_course.train --results DIR wrote, on any cluster"
    )
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.set_defaults(run=main)


def main(args):
    """Run or read the comparison, print the table and write the results."""
    writable_folder(args.out)
    results = compare.read(args.read) if args.read else run(args)
    print(compare.table(results))
    for path in compare.save(results, args.out):
        print(f"wrote {path}")


def run(args):
    """Train with every stage, as the options say."""
    stages = compare.check_stages(args.stages)
    link = chosen_link(args.link, args.latency, args.link_mode, args.device)
    return compare.run(
        args.problem,
        args.world_size,
        args.steps,
        stages,
        args.device,
        args.dtype,
        global_batch=args.global_batch,
        lr=args.lr,
        bucket_cap_mb=args.bucket_cap_mb,
        seed=args.seed,
        parameters=args.parameters,
        timeout=args.timeout,
        link=link,
        progress=True,
    )


def chosen_link(bandwidth, latency, mode, device):
    """The emulated link that the options ask for, or None: GPUs have links of their own."""
    if bandwidth == "none" or (bandwidth == "auto" and device != "cpu" and torch.cuda.device_count()):
        return None
    from .running import links

    return links.default_link(bandwidth="200Mbit" if bandwidth == "auto" else bandwidth, latency=latency, mode=mode)
