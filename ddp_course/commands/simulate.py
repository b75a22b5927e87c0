"""The command `ddp-course simulate`: a table and a figure of training on devices that are not at
hand.
"""

import argparse

from tabulate import tabulate

from ..measuring import theory
from ..measuring.simulate import resnets
from ..measuring.simulate.network import Network
from ..measuring.simulate.step import Step, simulate
from ..running import files, presets, units


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to its parser."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument(
        "--model", default="resnet50", choices=resnets.SHAPES, help="whose layers are simulated"
    )
    parser.add_argument("--step-time", default="100ms", help="computing of a step on one device")
    parser.add_argument("--devices", default="1..4096", help="1..4096 (doubling), or 6")
    parser.add_argument("--per-host", type=units.whole_number, default=8, help="devices on a host")
    parser.add_argument(
        "--link", default="100Gbit", help="bandwidth between hosts, or a link's name"
    )
    parser.add_argument(
        "--local-link", default="NVLink H100", help="bandwidth between the devices of a host"
    )
    parser.add_argument("--latency", default="10us", help="of a message between hosts")
    parser.add_argument("--local-latency", default="2us", help="of a message inside a host")
    parser.add_argument("--algorithm", default="ring", help=", ".join(theory.ALL_REDUCE))
    parser.add_argument("--bucket-cap", type=units.positive_number, default=25.0, help="in MiB")
    parser.add_argument("--out", default="results", help="folder of simulate.png")


def main(args: argparse.Namespace) -> None:
    """Print the table, write the figure."""
    from ..showing.simulator_plots import scaling_figure

    devices = parse_devices(args.devices)
    algorithm = args.algorithm.replace("-", "_")
    between = costs(args.link, args.latency)
    within = costs(args.local_link, args.local_latency)
    network = Network(between, within, args.per_host)
    folder = files.writable_folder(args.out)
    profile = resnets.profile(args.model, units.seconds(args.step_time, zero=False))
    lines = {}
    for name in (algorithm, "ring", "hierarchical_ring", "parameter_server"):
        lines[name] = [simulate(profile, k, network, name, args.bucket_cap) for k in devices]
    hosts = f"{args.per_host} devices per host at {args.local_link}, link {args.link}"
    print(
        f"{args.model}: {profile.gradient_bytes / 1e6:.4g} MB of gradients, {args.step_time} of"
        " computing per step"
    )
    print(f"{args.algorithm}, {hosts}")
    print(table(lines[algorithm]))
    picture = scaling_figure(lines, f"{args.model}, {hosts}")
    print(picture.message)
    print(f"figure: {files.replace_file(folder / 'simulate.png', picture.png())}")


def costs(link: str, latency: str) -> theory.Costs:
    """What messages cost over a link, from its bandwidth or its name, and a latency."""
    return theory.Costs.of_link(presets.bandwidth(link), units.seconds(latency))


def table(steps: list[Step]) -> str:
    """The steps as lines of text: devices, milliseconds, efficiency."""
    rows = []
    for step in steps:
        seconds = (step.step_s, step.compute_s, step.communication_s, step.exposed_s)
        rows.append([step.world_size, *(1e3 * each for each in seconds), f"{step.efficiency:.1%}"])
    return tabulate(
        rows,
        ["devices", "step ms", "computing", "sending", "exposed", "efficiency"],
        "plain",
        floatfmt=".3f",
        colalign=["right"] * 6,
        disable_numparse=[5],
    )


def parse_devices(text: str) -> list[int]:
    """Numbers of devices from "1..4096" (doubling from the first up to the last) or "6"; ValueError
    if bad.
    """
    first, _, last = text.partition("..")
    try:
        devices = [int(first) << k for k in range(21) if int(first) << k <= int(last or first)]
    except ValueError:
        devices = []
    if not devices or devices[0] < 1 or devices[-1] > 1_048_576:
        raise ValueError(
            f'"{text}" are no numbers of devices; write 1..4096 or 6: they go from 1 to 1048576, '
            "the smaller first"
        )
    return devices
