"""The command `manyranks run`: rehearse a script for torchrun on many ranks, in virtual time.

Exit codes: 0 the script ran; 1 it failed; 2 the request cannot be; 3 it differs from what --expect
keeps, or is wrong in some order of its messages.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from ..devices.device import EXAMPLE, FULL, Device, Reach
from ..errors import EmulationError, LaunchError
from .picture import picture
from .rehearse import Request, orders_of, rehearse
from .report import Report
from .script import find_script
from .trace import trace

FAILED = 1
IMPOSSIBLE = 2
DIFFERENT = 3
FOLDED = "The first and the last rank were run, the others are their copies."
KEPT = ("step_s", "collectives", "bytes", "hidden", "peak_bytes")  # --expect compares these.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `manyranks run` to a parser."""
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="K", help="how many ranks")
    add(
        "--device",
        required=True,
        help='a name such as H100, or rates such as "989TFLOP/s" or "989TFLOP/s,3.3TB/s"',
    )
    add(
        "--reach",
        metavar="SHARES",
        help=f"what kernels reach of the device, as in {EXAMPLE} (default: all of it)",
    )
    add("--link", help="between ranks: NVLink, 100Gbit, … (default: no time)")
    add("--hosts", type=int, metavar="N", help="hosts, with as many ranks each")
    add("--between", metavar="LINK", help="between hosts, of all cards of a host")
    add("--latency", default="0ms", help="one way, such as 10us (default 0ms)")
    add("--sizes-only", action="store_true", help="nothing is computed: models may be very large")
    add(
        "--fold",
        action="store_true",
        help="with --sizes-only: run the first and the last rank, and book the others as copies",
    )
    add("--answer", type=float, metavar="NUMBER", help="with --sizes-only, for loss.item()")
    add("--no-streams", action="store_true", help="the host waits for each operation")
    add("--orders", action="store_true", help="try every order of messages, too")
    add("--timeout", type=float, default=3600.0, help="seconds (default 3600)")
    add("--report", metavar="FILE", type=Path, help="write report.json there")
    add("--trace", metavar="FILE", type=Path, help="write a trace for Perfetto")
    add("--picture", metavar="FILE", type=Path, help="draw the last step (SVG)")
    add("--expect", metavar="FILE", type=Path, help="compare with a report that was kept")
    add(
        "-m", "--module", action="store_true", help="the script is a module's name, as for torchrun"
    )
    add("script", help="a script for torchrun")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def main(args: argparse.Namespace) -> int:
    """Rehearse as the options say; return the exit code."""
    try:
        args.file = find_script(args.script, args.module).file
        request = request_of(args)
        report = rehearse(args.script, args.arguments, request)
        print(report.words())
        print(remarks(request))
        write(args, report)
        annotate("notice", args.file, report.line())
        wrong = differences(args, report)
        if args.orders:
            verdict = orders_of(args.script, args.arguments, request)
            print(verdict)
            wrong = wrong or not verdict.ok
    except (EmulationError, ValueError, OSError) as error:
        return tell(str(error), IMPOSSIBLE)
    except LaunchError as error:
        annotate("error", args.file, str(error).partition("\n")[0])
        remark = f"\n\n{FOLDED}" if args.fold else ""
        return tell(f"{error}{remark}", FAILED)
    return DIFFERENT if wrong else 0


def request_of(args: argparse.Namespace) -> Request:
    """Return the request of the options; raises EmulationError or ValueError."""
    device = Device(*[word.strip() for word in args.device.split(",")][:2])
    device.streams = not args.no_streams
    if args.reach:
        device.reach = Reach.read(args.reach)
    return Request(
        ranks=args.ranks,
        device=device,
        link=args.link,
        hosts=args.hosts,
        between=args.between,
        latency=args.latency,
        sizes_only=args.sizes_only,
        fold=args.fold,
        module=args.module,
        answer=args.answer,
        timeout=args.timeout,
        progress=sys.stderr is not None and sys.stderr.isatty(),
    )


def remarks(request: Request) -> str:
    """Return what a reader must know of the numbers."""
    words = [f"Virtual time on {request.ranks} x {request.device}."]
    if request.emulated is None:
        words.append("Messages take no time: there is no --link.")
    if request.device.streams:
        words.append("The host runs ahead of the device, and costs nothing.")
    else:
        words.append("The host waits for each operation, so only torch's DDP overlaps.")
    if request.sizes_only:
        words.append("Nothing was computed.")
    if request.fold:
        words.append(FOLDED)
    if request.device.reach == FULL:
        words.append("Kernels reach the device's full rate: real ones reach a part (--reach).")
    return " ".join(words)


def write(args: argparse.Namespace, report: Report) -> None:
    """Write the files that the options ask for."""
    if args.report:
        text = json.dumps(report.describe(), indent=1)
        args.report.write_text(f"{text}\n", encoding="utf-8")
    if args.picture:
        args.picture.write_text(picture(report), encoding="utf-8")
    if args.trace:
        args.trace.write_text(json.dumps(trace(report.records)), encoding="utf-8")


def differences(args: argparse.Namespace, report: Report) -> bool:
    """Say what differs from the report that --expect keeps; return whether anything does."""
    if not args.expect:
        return False
    kept = json.loads(args.expect.read_text(encoding="utf-8"))["summary"]
    found = report.summary()
    different = [name for name in KEPT if kept.get(name) != found.get(name)]
    for name in different:
        words = f"{name} is {found.get(name)}, and was {kept.get(name)} in {args.expect}"
        tell(words, DIFFERENT)
        annotate("error", args.file, words)
    return bool(different)


def annotate(level: str, script: str, words: str) -> None:
    """Print a line that GitHub shows beside the script, where this runs in a workflow."""
    if os.environ.get("GITHUB_ACTIONS"):
        print(f"::{level} file={script},title=manyranks run::{words}")


def tell(words: str, code: int) -> int:
    """Say something on standard error, and return an exit code."""
    print(f"manyranks: {words}", file=sys.stderr)
    return code
