"""One run that a random user starts, kills, ends by Ctrl-C, leaves, continues, finishes and looks at, in any order.

Whatever came before, a finished run is to the last bit one that nobody disturbed: of all its rounds, or of the rounds
after which it has ended. What reads it changes nothing in its folder, and no round that is kept is trained again.
"""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import own_steps
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from rich.console import Console
from small_process import Kill, llm_fed

from llm_fed.audit.audit import audit
from llm_fed.basics.errors import UserError
from llm_fed.eval.report import write_report
from llm_fed.experiment.ending import Ending
from llm_fed.experiment.rounds import opened
from llm_fed.experiment.run import train
from llm_fed.runs.checkpoint import rounds_in
from llm_fed.runs.records import timed_rounds
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import load

ROUNDS = 4
SAME_LR = {"steps": 2, "batch_size": 2, "lr": 0.02, "lr_end": 0.02}  # so a shorter run has the same rates
FAMILIES: dict[str, dict[str, Any]] = {
    "own steps": {"method": {"name": "fedlora"}},
    "local": {"method": {"name": "local"}},
    "fedmerge, best round": {"method": {"name": "fedmerge", "num_models": 2}, "eval": {"select": "best"}},
    "stop rule": {"method": {"name": "fedlora"}, "stop": {"patience": 2, "min_delta": 100.0}},
}
PLACES = (
    "llm_fed.federation.loop:save", "llm_fed.federation.loop:end_early", "llm_fed.engine.fit:FusedFit.step",
    "llm_fed.engine.generation:generate", "llm_fed.experiment.finish:write_report", "os:replace", "os:fsync",
    "pathlib:Path.unlink", "shutil:rmtree",
)  # fmt: skip
NO_ROUND = "no checkpoint of any round"  # why a run that has begun is not finished
VOLATILE = ("checkpoints/", "timing.jsonl", "report.html", "delivered.json", ".lock")


class Pressing(Reporter):
    """Presses Ctrl-C in a round."""

    def __init__(self, round: int, times: int):
        super().__init__(Console(quiet=True))
        self._round, self._times = round, times
        self.pressed = False

    def record(self, record: Any) -> None:
        if self._times and (record["kind"], record.get("round")) == ("round", self._round):
            times, self._times = self._times, 0
            for _ in range(times):
                self.pressed = True
                os.kill(os.getpid(), signal.SIGINT)


class SteeredRun(RuleBasedStateMachine):
    """`small` and `work` are set by the test; `undisturbed` are the runs that nobody disturbs, by family and rounds."""

    small: Any
    work: Path
    undisturbed: dict[tuple[str, int], Path]
    counts: dict[str, int]

    @initialize(family=st.sampled_from([*FAMILIES]))
    def begin(self, family: str) -> None:
        self._family = family
        self._place = Path(tempfile.mkdtemp(dir=self.work))
        self._run, self._file = self._place / "run", self._place / "c.yaml"
        self._write(self._file, family)
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def teardown(self) -> None:
        if not hasattr(self, "_run"):
            return
        signal.signal(signal.SIGINT, self._before)
        if self._summary():
            found = audit(self._run, every=True, reporter=Reporter(Console(quiet=True)))
            assert not found.findings, found.findings
        shutil.rmtree(self._place)

    @rule(flag=st.sampled_from(["", "", "--continue", "--finish"]), at=st.integers(1, ROUNDS), times=st.integers(0, 2))
    def command(self, flag: str, at: int, times: int) -> None:
        """The command in this process, with Ctrl-C in a round if it comes so far; twice leaves at once."""
        self._count(f"{flag or 'run'}, Ctrl-C x {times}")
        done, before = self._rounds(), self._summary()
        pressing, ending = Pressing(at, times), Ending(flag if flag == "--finish" else "", by_key=True)
        try:
            result = train(load(self._file), self._run, reporter=pressing, ending=ending, goes_on=flag == "--continue")
        except KeyboardInterrupt:
            assert pressing.pressed and (times == 2 or flag == "--finish")
            assert self._rounds() >= done and not self._summary()
            return
        except UserError as error:
            assert flag == "--finish" and not done and not before and NO_ROUND in str(error)
            return
        if before and not (flag == "--continue" and "ended" in before):
            assert result == before == self._summary()
        if pressing.pressed and at < ROUNDS:
            assert result["ended"]["round"] == at
        if flag == "--finish" and not before:
            assert result.get("ended", {"round": ROUNDS})["round"] == done
        self._check(done if before is None else 0)

    @rule(place=st.sampled_from(PLACES), n=st.integers(1, 30), flag=st.sampled_from(["", "", "--continue", "--finish"]))
    def killed(self, place: str, n: int, flag: str) -> None:
        """The command in a process of its own, which dies at a place; if it gets through, it is as any other."""
        self._count(f"kill at {place}")
        done, before, begun = self._rounds(), self._summary(), (self._run / "config.yaml").is_file()
        words = ["run", str(self._file), "--out", str(self._run), *([flag] if flag else [])]
        code = llm_fed(words, self._place / "log", Kill(place, n))
        said = (self._place / "log").read_text()
        assert "Traceback" not in said, said
        if code == 2:
            assert not done and not before and (flag == "--finish" if begun else flag), said
            assert (NO_ROUND if begun else f"holds no run, and {flag} is for one that has begun") in said, said
        elif code == 0:
            assert begun or not flag, said
            self._check()
        else:
            assert code == -signal.SIGKILL, said
            assert self._rounds() >= done

    @precondition(lambda self: hasattr(self, "_run") and rounds_in(self._run / "checkpoints"))
    @rule(data=st.data())
    def look_at_a_round(self, data: Any) -> None:
        self._count("look")
        round = data.draw(st.sampled_from(rounds_in(self._run / "checkpoints")))
        before = everything(self._run)
        with opened(f"{self._run}@{round}", reporter=Reporter(Console(quiet=True))) as folder:
            if "select" not in FAMILIES[self._family].get("eval", {}):
                assert weights(folder) == weights(self._whole(round))
        with opened(f"{self._run}@best", reporter=Reporter(Console(quiet=True))) as folder:
            assert weights(folder)
        assert everything(self._run) == before
        write_report(self._run)
        before.pop("report.html", None)
        after = everything(self._run)
        assert after.pop("report.html") and after == before

    def _check(self, done: int = 0) -> None:
        """A command has got through: the run is finished, and what it holds is that of one that nobody disturbed."""
        summary = self._summary()
        assert summary is not None
        last = summary["ended"]["round"] if "ended" in summary else ROUNDS
        whole = self._whole(last)
        assert weights(self._run) == weights(whole)
        assert (self._run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        assert summary["scores"] == json.loads((whole / "summary.json").read_text())["scores"]
        assert not list(self._run.rglob("*partial*"))
        if "ended" not in summary and "stop" not in FAMILIES[self._family]:
            mine, other = everything(self._run), everything(whole)
            assert {n: d for n, d in mine.items() if not n.startswith(VOLATILE)} == {
                n: d for n, d in other.items() if not n.startswith(VOLATILE)
            }
        rounds = [line["round"] for line in timed_rounds(self._run)]
        assert len(rounds) == len(set(rounds)) and last >= done

    def _whole(self, rounds: int) -> Path:
        """A run of so many rounds that nobody has disturbed."""
        key = self._family, rounds
        if key not in self.undisturbed:
            place = Path(tempfile.mkdtemp(dir=self.work))
            self._write(place / "c.yaml", self._family, rounds)
            train(load(place / "c.yaml"), place / "run", reporter=Reporter(Console(quiet=True)))
            self.undisturbed[key] = place / "run"
        return self.undisturbed[key]

    def _write(self, path: Path, family: str, rounds: int | None = None) -> None:
        changes = {"rounds": rounds or ROUNDS, **FAMILIES[family]}
        if changes["method"]["name"] == "fedlora":
            changes |= own_steps.alone(after=changes["rounds"])
        if rounds is not None:
            changes.pop("stop", None)
        evaluation = {"select": "last", "every": 1, **changes.pop("eval", {})}
        self.small.config(path, local=SAME_LR, eval=evaluation, **changes)

    def _rounds(self) -> int:
        return max(rounds_in(self._run / "checkpoints"), default=0)

    def _summary(self) -> dict[str, Any] | None:
        """Of a finished run; one that `--continue` was about to take up again when it was killed is none."""
        path, taken_up = self._run / "summary.json", self._run / "continued.json"
        if not path.exists():
            return None
        done = {key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"}
        again = json.loads(taken_up.read_text())["round"] if taken_up.exists() else None
        return None if again is not None and again == done.get("ended", {}).get("round") else done

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def weights(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("adapters/*/*.safetensors")}


def everything(folder: Path) -> dict[str, bytes]:
    """All files but the lock, by name."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}
