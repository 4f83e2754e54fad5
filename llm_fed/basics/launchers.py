"""What launchers say in the environment: which process of how many this is, and settings of theirs that are not ours.

torchrun and `accelerate launch` set LOCAL_RANK in every process that they start. Without it a process is alone: job
systems and MPI set WORLD_SIZE, SLURM_NTASKS and the like also where nothing is started in parallel, and shells keep
them. The one exception is `accelerate launch` over mpirun, which leaves the ranks to MPI's own variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from llm_fed.basics.errors import UserError

# Of torchrun and of several MPIs, for the same number.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # set in every process that `accelerate launch` starts

# Settings of accelerate that would change something elsewhere, and have no effect here.
_REFUSED = (
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    "PARALLELISM_CONFIG_TP_SIZE", "PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_IPEX",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)  # fmt: skip
_NOTHING = ("", "no", "n", "false", "f", "off", "0", "none")
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ProcessRank:
    """Which of how many processes this is, and which of those on this machine."""

    rank: int
    local_rank: int
    size: int


def process_rank(environment: Mapping[str, str] = os.environ) -> ProcessRank | None:
    """Which process of a launch this is; None: it is alone. UserError where the variables do not say it."""
    if "LOCAL_RANK" in environment:
        keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE"]
    elif _BY_ACCELERATE in environment and "MASTER_ADDR" in environment:
        kinds = (_RANK, _LOCAL_RANK, _SIZE)
        keys = [next((name for name in names if name in environment), names[0]) for names in kinds]
    else:
        return None
    if environment.get(keys[2], "1") == "1":
        return None
    texts = {key: environment.get(key, "") for key in keys}
    numbers = [int(text) for text in texts.values() if text.isascii() and text.isdigit()]
    if len(numbers) < len(texts) or numbers[0] >= numbers[2]:
        said = " ".join(f"{key}={text!r}" for key, text in texts.items())
        raise UserError(f"{said} do not say which of how many processes this is; {unset(environment)}")
    return ProcessRank(*numbers)


def unset(environment: Mapping[str, str] = os.environ) -> str:
    """What to do where no launcher has started this process."""
    names = [*_RANK, *_LOCAL_RANK, *_SIZE, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"]
    return f"where no launcher started it: unset {' '.join(name for name in names if name in environment)}"


def check(dtype: str | None = None, environment: Mapping[str, str] = os.environ) -> None:
    """UserError for what a launcher was told and what would not happen here, and what to set. `dtype`: that of the
    base, where it is known."""
    values = {name: environment.get(name, "").strip() for name in (*_REFUSED, _BY_ACCELERATE)}
    for name, value in values.items():
        fine = _PRECISIONS if name == _BY_ACCELERATE else ("1",) if name.endswith(("_SIZE", "_STEPS")) else ()
        if value.lower() not in (*_NOTHING, *fine):
            raise UserError(
                f"accelerate's configuration sets {name}={value}, which has no effect: each process holds a whole base "
                "and computes in base.dtype. Leave it out, as scripts/launch/gpu-8.yaml does; a base that does not fit "
                "needs base.quantization=nf4 or, in one process, base.device_map=auto"
            )
    requested = values[_BY_ACCELERATE].lower()
    if dtype and _PRECISIONS.get(requested, dtype) != dtype:
        raise UserError(
            f"mixed_precision: {requested} in accelerate's configuration ({_BY_ACCELERATE}) has no effect: base.dtype "
            f"decides, and it is {dtype}. Set mixed_precision: 'no', or base.dtype={_PRECISIONS[requested]}"
        )


def wants_cpu(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get("ACCELERATE_USE_CPU", "").strip().lower() not in _NOTHING


def notes(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What a user should know who seems to have meant several processes, where this one is alone."""
    if process_rank(environment) is not None:
        return []
    if _BY_ACCELERATE in environment and "MASTER_ADDR" in environment:
        return [
            "accelerate launch has started one process, as it does for CPUs without an MPI host file; "
            "scripts/launch/cpu-2.yaml starts several"
        ]
    size = environment.get("WORLD_SIZE", "")
    if "LOCAL_RANK" not in environment and size not in ("", "1"):
        return [
            f"WORLD_SIZE={size} is set, but no LOCAL_RANK, so this process trains alone; torchrun and accelerate "
            "launch start several that share the work"
        ]
    return []


def copy_of(environment: Mapping[str, str] = os.environ) -> str:
    """Which of several copies of a command this is, where srun or mpirun has started them; empty where it is alone."""
    names = [("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), *zip(_SIZE[1:], _RANK[1:], strict=True)]
    for count, rank, name in ((environment.get(size, ""), environment.get(rank, ""), size) for size, rank in names):
        if count.isdecimal() and int(count) > 1 and rank.isdecimal():
            said = f"; this is copy {int(rank) + 1} of {count} ({name}) that srun or mpirun started"
            return f"{said}; start one, and with torchrun or accelerate launch as many as should share its work"
    return ""


@contextmanager
def alone() -> Iterator[None]:
    """Within, the environment says nothing of other processes, whatever a job system or a shell has left there."""
    hidden = {name: os.environ.pop(name) for name in (*_RANK, *_LOCAL_RANK, *_SIZE) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
