"""Made-up trees of control groups: /proc and /sys as a kernel shows them to one process, and what is free there."""

from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies

SIZES = strategies.integers(0, 2**40)
NAMES = strategies.sampled_from(
    ["user.slice", "user-1000.slice", "docker", "job_7", "step_0", "a b", "kubepods.slice", "x"]
)


@dataclass(frozen=True)
class Level:
    """One group: limits in bytes (None: none), the usage, and the page cache within it that can be taken back."""

    name: str
    most: int | None
    high: int | None  # version 2 alone
    usage: int
    cache: int
    killed: int

    def free(self, version: int) -> int | None:
        """What its limits leave; None without any."""
        limits = [size for size in (self.most, self.high if version == 2 else None) if size is not None]
        return max(0, min(limits) - max(0, self.usage - self.cache)) if limits else None


@dataclass(frozen=True)
class Tree:
    """The groups from the root to the process, and how they are shown to it.

    Attributes:
        shown: `all`: the whole tree, with the process's path in it; `part`: a container of old, where only the group at
            `cut` is mounted, while /proc/self/cgroup has the path on the host; `namespace`: the group at `cut` is the
            root of all that the process sees.
        mount: where the hierarchy is mounted.
    """

    version: int
    levels: tuple[Level, ...]
    shown: str
    cut: int
    mount: str

    @property
    def visible(self) -> tuple[Level, ...]:
        return self.levels if self.shown == "all" else self.levels[self.cut :]

    def free(self) -> int | None:
        return min((free for level in self.visible if (free := level.free(self.version)) is not None), default=None)

    def killed(self) -> int:
        return sum(level.killed for level in self.visible)

    def write(self, root: Path) -> None:
        names = [level.name for level in self.levels[1:]]
        below = names if self.shown == "all" else names[self.cut :]
        path = "/" + "/".join(below if self.shown == "namespace" else names)
        part = "/" + "/".join(names[: self.cut]) if self.shown == "part" else "/"
        kind, options = ("cgroup2", "rw") if self.version == 2 else ("cgroup", "rw,cpu,memory")
        lines = [
            "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
            f"30 22 0:26 {_escaped(part)} {_escaped(self.mount)} rw,nosuid shared:9 - {kind} {kind} {options}",
        ]
        own = "0::" if self.version == 2 else "3:cpu,memory:"
        _put(root / "proc/self/mountinfo", "\n".join(lines) + "\n")
        _put(root / "proc/self/cgroup", f"9:pids:/other\n{own}{path}\n")
        _put(root / "proc/self/status", "Name:\tx\nVmSize:\t  10 kB\nVmData:\t 5 kB\n")
        for number, level in enumerate(self.visible):
            _group(root / self.mount.strip("/") / "/".join(below[:number]), self.version, level)


def _group(folder: Path, version: int, level: Level) -> None:
    if version == 2:
        _put(folder / "memory.max", "max" if level.most is None else str(level.most))
        _put(folder / "memory.high", "max" if level.high is None else str(level.high))
        _put(folder / "memory.current", str(level.usage))
        _put(folder / "memory.stat", f"anon 1\ninactive_file {level.cache}\n")
        _put(folder / "memory.events", f"low 0\noom 9\noom_kill {level.killed}\n")
        return
    _put(folder / "memory.limit_in_bytes", str(9223372036854771712 if level.most is None else level.most))
    _put(folder / "memory.usage_in_bytes", str(level.usage))
    _put(folder / "memory.stat", f"inactive_file 3\ntotal_inactive_file {level.cache}\n")
    _put(folder / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {level.killed}\n")


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _escaped(path: str) -> str:
    return path.replace(" ", "\\040")


@strategies.composite
def trees(draw: strategies.DrawFn) -> Tree:
    """Any tree."""
    version = draw(strategies.sampled_from([1, 2]))
    maybe = strategies.none() | SIZES
    level = strategies.builds(
        Level, NAMES, most=maybe, high=maybe, usage=SIZES, cache=SIZES, killed=strategies.integers(0, 3)
    )
    levels = tuple(draw(strategies.lists(level, min_size=1, max_size=5)))
    usual = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
    return Tree(
        version,
        levels,
        draw(strategies.sampled_from(["all", "part", "namespace"])),
        draw(strategies.integers(0, len(levels) - 1)),
        draw(strategies.sampled_from([usual, "/cgroup", "/mnt/my groups"])),
    )
