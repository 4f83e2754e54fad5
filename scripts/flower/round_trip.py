"""What Flower itself costs on this machine: seconds per round of empty work, and bytes beside the payload.

python scripts/flower/round_trip.py [--nodes 3] [--rounds 5] [--sizes 1000,1000000,30000000]

Starts a deployment of its own on free ports of 127.0.0.1 and ends it; nothing is written outside a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from deployment import Deployment

APP = Path(__file__).parent / "hello"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1000,1000000,30000000", help="message sizes in bytes, each way")
    given = parser.parse_args()
    names = [f"node{number}" for number in range(given.nodes)]
    print("| bytes each way | s per round, median | lowest | highest | bytes down beside them | bytes up beside them |")
    print("|---|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(Path(folder) / "deployment", {name: {} for name in names}) as deployment,
    ):
        for size in map(int, given.sizes.split(",")):
            run = deployment.run(APP, {"nodes": given.nodes, "rounds": given.rounds, "size": size})
            status = deployment.wait(run, seconds=60.0 * given.rounds)
            said = deployment.logs(run)
            if status != "finished:completed":
                raise SystemExit(f"round_trip.py: the run is {status}:\n{said}")
            seconds = [json.loads(line)["seconds"] for line in said.splitlines() if line.startswith('{"round"')]
            traffic = deployment.describe(run)["network-traffic"]
            messages = given.nodes * given.rounds
            down, up = (traffic[key] / messages - size for key in ("outbound-bytes", "inbound-bytes"))
            print(
                f"| {size} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | "
                f"{down:.0f} | {up:.0f} |"
            )


if __name__ == "__main__":
    main()
