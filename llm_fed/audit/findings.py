"""What an audit has found: findings, and what could not be checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """Something that differs from what it should be."""

    round: int  # 0: of the whole run, or of what was there before the first round
    client: str  # whose it is; "server", or empty where it is of the whole run
    kind: str  # chain | file | checkpoint | message | client pass | memory | server step | scores | export
    what: str


@dataclass
class Audit:
    """What was checked, in words; what differs; what could not be checked, and why. `drift`: where nothing can be equal
    to the last bit, by "from-to" the distance from what the run has kept of the round `to`, as a share of the way from
    round `from` to round `to`."""

    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    drift: dict[str, float] = field(default_factory=dict)

    @property
    def code(self) -> int:
        """The exit code: 1 if something differs, else 3 if something could not be checked, else 0."""
        return 1 if self.findings else 3 if self.unchecked else 0

    def find(self, round: int, client: str, kind: str, what: str) -> None:
        """Add a finding; of one kind, only the first about a client in a round."""
        if not any((known.round, known.client, known.kind) == (round, client, kind) for known in self.findings):
            self.findings.append(Finding(round, client, kind, what))


def words(rounds: Collection[int]) -> str:
    return ", ".join(map(str, sorted(rounds))) or "none"
