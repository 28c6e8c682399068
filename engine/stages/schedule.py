"""The order in which one pass gathers, the same on every rank whatever its graph needs."""

from collections.abc import Callable, Sequence

from engine.stages.units import Unit


class Schedule:
    """Turns of units. Coming to one issues the gathers of all before it too, and the end those that are left.

    So a rank serves the others with what it does not use itself. A rank waits only for collectives that it has issued,
    and all ranks issue the same ones in the same order: none can wait for ever. Between two turns nothing is issued but
    what belongs to the present one.

    Args:
        order: in which units have their turns; one may have several.
        issue: starts gathering a unit.
        leave: called when a turn is over, with whether it was the unit's last.
        finish: called when all are over.
        ahead: elements to issue beyond the present turn.
    """

    def __init__(self, order: Sequence[Unit], *, issue: Callable[[Unit], None], leave: Callable[[Unit, bool], None],
                 finish: Callable[[], None], ahead: int) -> None:
        self._order = tuple(order)
        self._last_turns = {unit.index: turn for turn, unit in enumerate(order)}
        self._issue, self._leave, self._finish, self._ahead = issue, leave, finish, ahead
        self._finished = False
        self._turn = -1
        self._issued = 0
        if self._order:
            self._issue_to(0)

    def is_last_turn_of(self, unit: Unit) -> bool:
        """Whether the present turn is this unit's, and it has none after it."""
        return self._turn < len(self._order) and self._last_turns.get(unit.index) == self._turn

    def reach(self, unit: Unit) -> bool:
        """Go on to the unit's next turn; False where it has none any more."""
        for turn in range(self._turn + 1, len(self._order)):
            if self._order[turn] is unit:
                self._advance(turn)
                return True
        return False

    def finish(self) -> None:
        """Go on past the last turn, once."""
        self._advance(len(self._order))
        if not self._finished:
            self._finished = True
            self._finish()

    def _advance(self, turn: int) -> None:
        while self._turn < turn:
            if self._turn >= 0:
                unit = self._order[self._turn]
                self._leave(unit, self.is_last_turn_of(unit))
            self._turn += 1
            if self._turn < len(self._order):
                self._issue_to(self._turn)

    def _issue_to(self, turn: int) -> None:
        """Issue this turn and, within the budget, those after it, up to a unit that may still be gathered from before.
        """
        last, budget = turn, self._ahead
        recent = list(self._order[max(turn - 1, 0):turn + 1])
        while last + 1 < len(self._order):
            unit = self._order[last + 1]
            if unit.size > budget or unit in recent:
                break
            budget -= unit.size
            recent.append(unit)
            last += 1
        while self._issued <= last:
            self._issued += 1
            self._issue(self._order[self._issued - 1])
