"""What launchers say in the environment: which process of how many this is, and settings of theirs that are not ours.

torchrun and `accelerate launch` set LOCAL_RANK in every process that they start. Without it a process is alone: job
systems and MPI set WORLD_SIZE, SLURM_NTASKS and the like also where nothing is started in parallel, and shells keep
them. The one exception is `accelerate launch` over mpirun, which leaves the ranks to MPI's own variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llm_fed.basics.errors import UserError

# Of torchrun and of several MPIs, for the same number.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_BY_ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # set in every process that `accelerate launch` starts

_UNSHARDED = (
    "each process would hold a whole base all the same. Use distributed_type: MULTI_GPU, as scripts/launch/gpu-8.yaml "
    "does, and for a base that does not fit base.quantization=nf4 or, in one process, base.device_map=auto"
)
# By variable: the key of accelerate's configuration, the values that change nothing here, and what to do about others.
_REFUSED = {
    "ACCELERATE_USE_FSDP": ("distributed_type: FSDP", (), _UNSHARDED),
    "ACCELERATE_USE_DEEPSPEED": ("distributed_type: DEEPSPEED", (), _UNSHARDED),
    "ACCELERATE_USE_MEGATRON_LM": ("distributed_type: MEGATRON_LM", (), _UNSHARDED),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": ("parallelism_config_dp_shard_size", ("1",), _UNSHARDED),
    "PARALLELISM_CONFIG_TP_SIZE": ("parallelism_config_tp_size", ("1",), _UNSHARDED),
    "PARALLELISM_CONFIG_CP_SIZE": ("parallelism_config_cp_size", ("1",), _UNSHARDED),
    "PARALLELISM_CONFIG_SP_SIZE": ("parallelism_config_sp_size", ("1",), _UNSHARDED),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": ("distributed_type", (), _UNSHARDED),
    "ACCELERATE_DYNAMO_BACKEND": (
        "dynamo_backend",
        (),
        "nothing is compiled here. Set dynamo_backend: 'no', or leave it out",
    ),
    "ACCELERATE_USE_IPEX": ("ipex", (), "nothing is optimised by IPEX here. Set ipex: false"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        ("1",),
        "a step of a client has local.batch_size examples, which are divided among passes by what fits. Set it to 1",
    ),
}
_NOTHING = ("", "no", "n", "false", "f", "off", "0", "none")
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ProcessRank:
    """Which of how many processes this is, and which of those on this machine."""

    rank: int
    local_rank: int
    size: int


def process_rank(environment: Mapping[str, str] = os.environ) -> ProcessRank | None:
    """The place of this process in a launch; None: it is alone. UserError for a variable that is missing or no
    number."""
    if "LOCAL_RANK" in environment:
        rank_key, local_key, size_key = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    elif _BY_ACCELERATE in environment and "MASTER_ADDR" in environment:
        rank_key, local_key, size_key = (_first(names, environment) for names in (_RANK, _LOCAL_RANK, _SIZE))
    else:
        return None
    size = _number(environment, size_key, 1)
    if size < 2:
        return None
    rank = _number(environment, rank_key)
    if rank >= size:
        raise UserError(f"{rank_key}={rank} and {size_key}={size}: ranks go up to {size - 1}; {unset(environment)}")
    return ProcessRank(rank, _number(environment, local_key), size)


def _first(names: Sequence[str], environment: Mapping[str, str]) -> str:
    return next((name for name in names if name in environment), names[0])


def _number(environment: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environment.get(key, "" if default is None else str(default)).strip()
    if (number := _whole(text)) is None:
        wrong = f"{key}={text!r} is no number" if text else f"{key} is not set"
        raise UserError(f"{wrong}, although this process seems to be one of a launch; {unset(environment)}")
    return number


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def unset(environment: Mapping[str, str] = os.environ) -> str:
    """What to do where no launcher has started this process."""
    names = [*_RANK, *_LOCAL_RANK, *_SIZE, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"]
    return f"where no launcher started it: unset {' '.join(name for name in names if name in environment)}"


def check(environment: Mapping[str, str] = os.environ) -> None:
    """UserError for what a launcher was told and what would not happen here, with its key and what to set."""
    for name, (key, fine, remedy) in _REFUSED.items():
        value = environment.get(name, "").strip()
        if value.lower() not in (*_NOTHING, *fine):
            raise UserError(f"{key} in accelerate's configuration ({name}={value}) has no effect: {remedy}")
    precision = environment.get(_BY_ACCELERATE, "").strip().lower()
    if precision not in (*_NOTHING, *_PRECISIONS):
        raise UserError(
            f"mixed_precision: {precision} in accelerate's configuration ({_BY_ACCELERATE}) has no effect: base.dtype "
            "decides in which numbers is computed. Set mixed_precision: 'no'"
        )


def check_precision(dtype: str, environment: Mapping[str, str] = os.environ) -> None:
    """UserError for a mixed precision of accelerate's configuration that is not the dtype in which is computed."""
    requested = environment.get(_BY_ACCELERATE, "").strip().lower()
    if requested in _PRECISIONS and _PRECISIONS[requested] != dtype:
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
    if "LOCAL_RANK" not in environment and (size := _whole(environment.get("WORLD_SIZE", "")) or 1) > 1:
        return [
            f"WORLD_SIZE={size} is set, but no LOCAL_RANK, so this process trains alone; torchrun and accelerate "
            "launch start several that share the work"
        ]
    return []


def tasks(environment: Mapping[str, str] = os.environ) -> str:
    """Which of several copies of a command this is, where srun or mpirun has started them; empty where it is alone."""
    for program, size, rank in (
        ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("mpirun", "PMI_SIZE", "PMI_RANK"),
    ):
        count, number = (_whole(environment.get(name, "")) for name in (size, rank))
        if count and count > 1 and number is not None:
            return (
                f"this is copy {number + 1} of {count} that {program} started ({size}); start one, and with "
                "torchrun or accelerate launch as many as should share its work"
            )
    return ""


@contextmanager
def alone() -> Iterator[None]:
    """Within, the environment says nothing of other processes, whatever a job system or a shell has left there."""
    hidden = {name: os.environ.pop(name) for name in (*_RANK, *_LOCAL_RANK, *_SIZE) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
