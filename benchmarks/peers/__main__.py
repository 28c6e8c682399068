"""Compare the engine with its peers, on this machine: `make bench-engine`, or this module in the peers' environment.

All engines of a group are alive and take turns, so that all see the same machine; ratios to DDP are paired inside each
round. Time is of whole optimizer steps, one thread a rank, with glibc's allocator as it is. Memory is the most that a
rank's heap and its even share of the memory that ranks share have been together, in steps taken before the clock is on.
The exit status is 0 if every engine ran and its losses are those they should be.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.live import HEAP_COUNTER, EngineFailedError, LiveEngine
from benchmarks.peers.plan import BASE, ENGINES, REFERENCE, SCENARIOS, Scenario, groups
from benchmarks.peers.results import EngineResult, Measured, compare, turn_order
from benchmarks.peers.table import Outcome, detail, summary
from benchmarks.peers.values import Turn
from engine.process import cpu_name

STEPS_PER_TURN = 2


def measure(scenario: Scenario, engines: Sequence[str], *, rounds: int) -> dict[str, Outcome]:
    """Every engine's outcome in a scenario, in the order of the tables."""
    reference = None
    if scenario.precision == "fp32":
        single = _start(REFERENCE, scenario)
        single.close()
        reference = single.ready.losses
    outcomes: dict[str, Outcome] = {}
    for group in groups(engines):
        measured, failures = _take_turns(scenario, group, rounds=rounds)
        base = measured[BASE]
        outcomes |= failures
        outcomes |= {name: compare(name, own, base, scenario=scenario, expected=reference or base.ready.losses)
                     for name, own in measured.items()}
    return {name: outcomes[name] for name in ENGINES if name in outcomes}


def _take_turns(scenario: Scenario, names: Sequence[str], *, rounds: int) -> tuple[dict[str, Measured], dict[str, str]]:
    """What the engines measured, and why others failed. The base must not fail."""
    live: dict[str, LiveEngine] = {}
    turns: dict[str, list[Turn]] = {}
    failures: dict[str, str] = {}
    try:
        for name in names:
            try:
                live[name] = _start(name, scenario)
            except EngineFailedError as error:
                _note_failure(name, error, failures)
        turns = {name: [] for name in live}
        for round_index in range(rounds):
            for name in turn_order(list(live), round_index):
                try:
                    turns[name].append(live[name].turn(STEPS_PER_TURN))
                except EngineFailedError as error:
                    del live[name]
                    _note_failure(name, error, failures)
            _tell(f"{scenario.name}: round {round_index + 1} of {rounds}")
        return {name: Measured(ready=own.ready, turns=turns[name]) for name, own in live.items()}, failures
    finally:
        for own in live.values():
            own.close()


def _start(name: str, scenario: Scenario) -> LiveEngine:
    start = time.monotonic()
    live = LiveEngine(name, scenario)
    _tell(f"{scenario.name}: {name} ready after {time.monotonic() - start:.0f} s")
    return live


def _note_failure(name: str, error: EngineFailedError, failures: dict[str, str]) -> None:
    """Without the base there is nothing to compare with."""
    if name == BASE:
        raise error
    _tell(f"{name} failed: {error}")
    failures[name] = str(error)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _as_data(outcomes: dict[str, dict[str, Outcome]], rounds: int) -> str:
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": version("torch"), "deepspeed": version("deepspeed")}
    scenarios = {scenario: {name: {"failed": outcome} if isinstance(outcome, str) else asdict(outcome)
                            for name, outcome in engines.items()} for scenario, engines in outcomes.items()}
    return json.dumps({"machine": machine, "rounds": rounds, "scenarios": scenarios}, indent=1)


def _is_right(outcome: Outcome) -> bool:
    return isinstance(outcome, EngineResult) and not outcome.trains_wrongly


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help=f"turns of each engine, {STEPS_PER_TURN} steps each")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME",
                        help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME",
                        help=f"of {', '.join(ENGINES)}; {BASE} always takes part")
    parser.add_argument("--markdown", action="store_true", help="print the last table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not HEAP_COUNTER.exists():
        parser.error("this is not the peers' environment: run `make bench-engine`")
    return options


def main() -> int:
    options = _parse()
    outcomes: dict[str, dict[str, Outcome]] = {}
    for name in options.scenarios:
        outcomes[name] = measure(SCENARIOS[name], options.engines, rounds=options.rounds)
        print(f"\n{SCENARIOS[name].title}\n{detail(outcomes[name])}\n", flush=True)
        if options.json:
            options.json.write_text(_as_data(outcomes, options.rounds))
    print(summary([SCENARIOS[name] for name in options.scenarios], outcomes, markdown=options.markdown))
    return 0 if all(_is_right(outcome) for engines in outcomes.values() for outcome in engines.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EngineFailedError as failure:
        sys.exit(f"Nothing to compare with: {failure}")
