"""What one scenario found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.crash.checker import ALWAYS, Check, Facts, complaints
from tests.crash.fleet import Fleet


@dataclass
class Report:
    """Complaints (none: the promises were kept) and figures worth telling."""

    complaints: list[str] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    def expect(self, holds: bool, complaint: str) -> bool:
        """Complain unless it holds. Returns whether it does."""
        if not holds:
            self.complaints.append(complaint)
        return holds


def facts(fleet: Fleet, acknowledged: list[str]) -> Facts:
    """What the checker judges by, once everything is quiet."""
    return Facts(
        acknowledged=acknowledged,
        rows=fleet.database.rows(),
        runs=fleet.runs(),
        accepted=[str(line["job"]) for line in fleet.lines("accepted")],
        killed=fleet.killed,
        frozen=fleet.frozen,
        unstarted=fleet.unstarted(),
    )


def judged(fleet: Fleet, known: Facts, report: Report, *more: Check, checks: Sequence[Check] = ALWAYS) -> Report:
    """Let the checker judge, and see that all is sound."""
    report.complaints += complaints(known, [*checks, *more])
    return sound(fleet, report)


def sound(fleet: Fleet, report: Report) -> Report:
    """Whatever was done: the database agrees with itself, and no process had a mishap of its own."""
    report.expect((verdict := fleet.database.integrity()) == "ok", f"integrity_check: {verdict}")
    report.complaints += fleet.mishaps()
    if report.complaints:
        report.figures["stderr"] = fleet.errors()[-2000:]
    return report


def kept(report: Report) -> bool:
    """True: every promise was kept. Else an AssertionError with all that is known."""
    if report.complaints:
        raise AssertionError(
            "\n".join([*report.complaints, *(f"{name}: {each}" for name, each in report.figures.items())])
        )
    return True
