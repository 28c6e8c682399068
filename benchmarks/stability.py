"""Whether a study names the same winner each time it is run.

    python -m benchmarks.stability [--json FILE] [--repeats N]

The same study of a small GPT on two CPU ranks, again and again: the real scheduler, worker processes and sampler, and a
new database each time, so that nothing is reused. Ends with 1 unless every repeat names the most frequent winner, or
declares that one tied with its own. What other repeats declare does not count.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from time import perf_counter

from autotune.domain.request import StudyRequest
from autotune.domain.study import Study, Trial
from autotune.scheduler.launcher.base import Launcher
from autotune.scheduler.launcher.local import LocalLauncher
from autotune.scheduler.loop import Scheduler
from autotune.store import Database
from benchmarks import report
from engine.config import TrainConfig

REQUEST = StudyRequest.model_validate({
    "name": "stability",
    "model": {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "sequence_length": 64},
    "training": {"global_batch_size": 16}, "hardware": {"device": "cpu", "devices": 2},
    "search": {"space": {"zero_stage": [0, 1, 2, 3], "micro_batch_size": [1, 2, 4, 8], "precision": ["fp32", "bf16"],
                         "activation_checkpointing": ["none", "full"]},
               "confirm_rounds": 3, "policy": {"max_steps": 10}},
    "budget": {"max_trials": 12}})
"""64 configurations, of which all should fit."""

_POLL_SECONDS = 0.2


async def repeat(number: int, launcher: Launcher, request: StudyRequest = REQUEST) -> report.Row:
    """Run the study once, with a database of its own.

    Raises:
        RuntimeError: it has no winner.
    """
    begun = perf_counter()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        database = Database(f"sqlite:///{folder}/autotune.sqlite3")
        database.upgrade()
        stop = asyncio.Event()
        working = asyncio.create_task(Scheduler(database, launcher).run(stop))
        try:
            study = await _ended(database, request)
        finally:
            stop.set()
            await working
        with database.read() as tx:
            trials = tx.trials.list(study.id)
        database.close()
    return _row(number, study, trials, perf_counter() - begun)


async def _ended(database: Database, request: StudyRequest) -> Study:
    with database.begin() as tx:
        study = tx.studies.add(request)
    while not study.state.is_final:
        await asyncio.sleep(_POLL_SECONDS)
        with database.read() as tx:
            study = tx.studies.get(study.id, with_plan=False)
    return study


def _row(number: int, study: Study, trials: Sequence[Trial], seconds: float) -> report.Row:
    best = study.best
    if best is None:
        raise RuntimeError(f"the study ended without a winner: {study.error or study.note}")
    low, high = best.tokens_per_second_interval
    tied = [_name(trials[place].config) for place in best.tie_with]
    return {"repeat": number, "winner": _name(best.config), "tokens/s": best.tokens_per_second, "from": low, "to": high,
            "over baseline": best.speedup, "tied with": ", ".join(tied), "trials": len(trials),
            "measurements": sum(len(trial.measurements) for trial in trials), "seconds": seconds}


def _name(config: TrainConfig) -> str:
    return (f"stage {config.zero_stage} micro {config.micro_batch_size} {config.precision} "
            f"recompute {config.activation_checkpointing}")


def strays(rows: Sequence[report.Row]) -> list[report.Row]:
    """Repeats whose winner is not the most frequent one, which is not in their own declared tie either.

    Of several that are equally frequent, that with the fewest such repeats counts.
    """
    counts = Counter(row["winner"] for row in rows)
    return min(([row for row in rows if winner != row["winner"] and winner not in _tie(row)]
                for winner, count in counts.items() if count == max(counts.values())), key=len)


def _tie(row: report.Row) -> set[str]:
    return set(str(row["tied with"]).split(", ")) - {""}


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="how many studies (default: %(default)s)")
    options = parser.parse_args()
    rows: list[report.Row] = []
    for _ in range(options.repeats):
        rows.append(asyncio.run(repeat(len(rows) + 1, LocalLauncher(device_type="cpu"))))
        report.write(rows, options.json)
    print(report.table(rows))
    found = strays(rows)
    for row in found:
        print(f"repeat {row['repeat']} names another winner, and no tie: {row['winner']}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
