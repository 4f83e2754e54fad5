"""How a user names a run, or one of its rounds: RUN, RUN@ROUND or RUN@best."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_fed.basics.errors import UserError
from llm_fed.runs.checkpoint import rounds_in

BEST = "best"


@dataclass(frozen=True)
class Place:
    """A folder, and of a run which round of it.

    Attributes:
        round: its number or `BEST`; None: what the run has exported.
    """

    folder: Path
    round: int | str | None = None

    @classmethod
    def parse(cls, text: str | Path) -> Place:
        """From `DIR`, `DIR@ROUND` or `DIR@best`; a folder whose own name has an @ in it is taken as it is.

        Raises:
            UserError: DIR is a run, and behind the @ stands something else.
        """
        folder, at, word = str(text).rpartition("@")
        if not at or Path(text).exists():
            return cls(Path(text))
        if word == BEST:
            return cls(Path(folder), "best")
        if word.isascii() and word.isdigit():
            return cls(Path(folder), int(word))
        if (Path(folder) / "config.yaml").is_file():
            raise UserError(f"{text}: behind the @ stands the number of a round, or {BEST}")
        return cls(Path(text))

    def __str__(self) -> str:
        return f"{self.folder}" + ("" if self.round is None else f"@{self.round}")


def check_kept(folder: Path, round: int) -> None:
    """Refuse a round of which a run has kept no checkpoint.

    Raises:
        UserError: which rounds it has, and what keeps others.
    """
    if round not in (kept := rounds_in(folder / "checkpoints")):
        known = ", ".join(map(str, kept)) or "none"
        raise UserError(
            f"{folder} has no checkpoint of round {round}, only of {known}; checkpoint.keep_rounds=[{round}] keeps it "
            "in a run that has not yet come so far"
        )
