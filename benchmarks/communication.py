"""Bytes that a rank sends per optimizer step, against theory and against what the network saw.

    python -m benchmarks.communication [--json FILE]

Theory, on N ranks in units of the parameters' bytes times (N - 1) / N, with A micro-batches per step: an all-reduce
sends 2; a reduce-scatter and an all-gather 1 each. So stages 0 and 1 send 2, stage 2 sends A + 1, and stage 3, which
gathers for forward and again for backward, 3 A. Counted by the engine as it issues collectives.

Where Linux allows a network namespace of one's own, the ranks run in one, through sockets as ranks of several hosts do,
and the bytes of its loopback interface, which include headers, are read before and after. Ends with 1 where more is
sent than theory says, or other than was counted.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks import report
from benchmarks.ranks import on_ranks, training_loop
from engine.collectives import SOCKETS
from engine.config import TrainConfig

BUCKET = 200_000
RANKS = (2, 3, 4)
STAGES = (0, 1, 2, 3)
ACCUMULATION = (1, 4)
STEPS = 3

PADDING = 0.03
HEADERS = 0.05
"""Of TCP and IP, and of the small messages in which ranks agree on something; shares of the bytes counted."""


def theory(stage: int, *, accumulation: int, ranks: int, parameter_bytes: float) -> float:
    """Bytes a rank sends per step."""
    passes = (2, 2, accumulation + 1, 3 * accumulation)[stage]
    return passes * parameter_bytes * (ranks - 1) / ranks


class Sent(NamedTuple):
    """Of one rank per step; what the loopback interface carried is of all ranks."""

    counted: float
    loopback: float
    collectives: str


def measure(private_network: bool) -> tuple[dict[tuple[int, int], Sent], int]:
    """On one rank: what it sent by stage and accumulation; the bytes of the parameters."""
    sent, parameter_bytes = {}, 0
    for stage, accumulation in product(STAGES, ACCUMULATION):
        config = TrainConfig(zero_stage=stage, gradient_accumulation_steps=accumulation, reduce_bucket_size=BUCKET,
                             allgather_bucket_size=BUCKET)
        loop = training_loop(config)
        loop.step(0)  # connects, and at stage 3 agrees on the order of reductions
        before, bytes_before = loop.trainer.collective_counts, loop.trainer.communicated_bytes
        loopback = _loopback_bytes() if private_network else 0
        for step in range(1, STEPS + 1):
            loop.step(step)
        loopback = _loopback_bytes() - loopback if private_network else 0
        counts = {kind: (count - before.get(kind, 0)) // STEPS
                  for kind, count in loop.trainer.collective_counts.items()}
        sent[stage, accumulation] = Sent((loop.trainer.communicated_bytes - bytes_before) / STEPS, loopback / STEPS,
                                         " ".join(f"{kind} {count}" for kind, count in counts.items() if count))
        parameter_bytes = 4 * sum(parameter.numel() for parameter in loop.trainer.module.parameters())
        loop.close()
    return sent, parameter_bytes


def rows_of(ranks: int, *, private_network: bool) -> list[report.Row]:
    """All stages on so many ranks."""
    results = on_ranks(ranks, measure, private_network)
    _, parameter_bytes = results[0]
    rows: list[report.Row] = []
    for stage, accumulation in product(STAGES, ACCUMULATION):
        here = [sent[stage, accumulation] for sent, _ in results]
        counted = sum(sent.counted for sent in here)
        seen = max(sent.loopback for sent in here) / counted if private_network else None
        expected = theory(stage, accumulation=accumulation, ranks=ranks, parameter_bytes=parameter_bytes)
        rows.append({
            "ranks": ranks, "stage": stage, "accumulation": accumulation,
            "sent MiB": report.mib(counted / ranks), "theory MiB": report.mib(expected),
            "sent / theory": counted / ranks / expected,
            "loopback / sent": seen, "collectives": here[0].collectives})
    return rows


def is_wrong(row: report.Row) -> bool:
    """Whether more was sent than theory says, or other than was counted."""
    ratio, seen = row["sent / theory"], row["loopback / sent"]
    assert isinstance(ratio, float)
    return ratio > 1 + PADDING or (isinstance(seen, float) and abs(seen - 1) > HEADERS)


def _loopback_bytes() -> int:
    """Received so far, read while no rank sends."""
    dist.barrier()
    lines = Path("/proc/net/dev").read_text().splitlines()
    received = next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))
    dist.barrier()
    return received


def _may_have_own_network() -> bool:
    try:
        return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name_and_flags = struct.pack("16sh14x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, name_and_flags)


_UNSHARE = ("unshare", "--map-root-user", "--net")
_IFF_UP, _SIOCSIFFLAGS = 1, 0x8914


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--private-network", action="store_true",
                        help="the network is this command's alone; it starts itself anew with this where it may")
    options = parser.parse_args()
    if not options.private_network and _may_have_own_network():
        command = [*_UNSHARE, sys.executable, "-m", "benchmarks.communication", "--private-network", *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode
    if options.private_network:
        _bring_loopback_up()
        os.environ[SOCKETS] = "1"
    else:
        print("no network namespace of its own: bytes are counted by the engine only")
    rows = [row for ranks in RANKS for row in rows_of(ranks, private_network=options.private_network)]
    print(report.table(rows))
    report.write(rows, options.json)
    return int(any(map(is_wrong, rows)))


if __name__ == "__main__":
    sys.exit(main())
