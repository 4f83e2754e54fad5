"""The configuration of a run: frozen dataclasses with documented defaults, and the check of their values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from llm_fed.errors import UserError
from llm_fed.errors import require as known


@dataclass(frozen=True)
class BaseConfig:
    """The model that everything starts from; under adapters it is frozen."""

    name: str = "meta-llama/Llama-3.2-3B-Instruct"  # a Hub id or a folder; of images also cnn, cnn-1 ... resnet-9 ...
    # Image models that clients have in the place of `name`, one after another in turn (cnn-1 ... cnn-5, resnet-9 ...);
    # `name` is then the small model of methods that share one.
    clients: tuple[str, ...] | None = None
    # float32 | bfloat16 | float16: the base's weights and the autocast of training
    # auto: bfloat16 on a GPU that has it, else float32; a run keeps what it began with
    dtype: str = "auto"
    quantization: str | None = None  # nf4 | int8 (bitsandbytes)
    device_map: str | None = None  # auto: the layers of a language model over all GPUs of one process (Accelerate)
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, ~1/3 more time
    revision: str | None = None  # a Hub revision


@dataclass(frozen=True)
class AdapterConfig:
    """The LoRA adapter that clients train (Hu et al. 2022); `adapter: null` trains a whole image model."""

    rank: int = 8
    alpha: float = 16  # the adapter's output is scaled by alpha / rank
    dropout: float = 0.05
    target_modules: tuple[str, ...] | str = (
        "q_proj",
        "v_proj",
    )  # last parts of module names, or one regular expression
    # Whose adapters the run starts from, in the place of fresh ones: a finished run's folder, a folder with one PEFT
    # folder per client, or one PEFT folder; see `start.give`.
    start: str | None = None


@dataclass(frozen=True)
class ColumnsConfig:
    """Column names of a user's own files; `null` lets the task look for the usual names."""

    prompt: str | None = None  # usual names: instruction, prompt, question, input
    input: str | None = None  # optional context that is put after the prompt
    answer: str | None = None  # usual names: output, response, answer, completion, target, generated
    options: str | None = None  # a list of strings, for option scoring
    client: str | None = None  # the client id, where one file holds all clients


@dataclass(frozen=True)
class PartitionConfig:
    """How examples become clients, where the data does not say it by itself."""

    # natural (folders, tasks, or columns.client) | split (k clients per natural one) | iid | dirichlet | pathological
    # (some labels each) | cluster (a part of the labels for each cluster of clients)
    kind: str = "natural"
    clients: int | None = None  # iid, dirichlet, pathological: how many clients; split: how many per natural client
    alpha: float = 0.5  # dirichlet, pathological: concentration
    classes: int | None = None  # pathological: how many labels a client holds
    sizes: tuple[int, ...] | None = None  # cluster: how many clients each cluster has
    label: str | None = None  # of text by label: the column that holds it
    test: float | None = None  # pool train and test, and make this share of what each client got its test split


@dataclass(frozen=True)
class ServerConfig:
    """The server's own examples; by default it has none."""

    examples: int | None = 0  # taken at random from the task's test split, or from the training split of `name`
    each: bool = False  # `examples` of each natural client (task, language, folder) instead of in total
    name: str | None = None  # another task: out-of-domain data; `examples` may then be null for all
    path: str | None = None  # where that task lies, as in task.path
    test: bool = False  # the rest of the test split stays at the server, where one model for all is tested


@dataclass(frozen=True)
class TaskConfig:
    """Whose examples, and how they become text or inputs of an image model."""

    name: str = "flan"
    path: str | None = None  # a folder with one folder per client, one file with a client column, or hf://owner/name
    groups: tuple[str, ...] | None = None  # keep only these natural clients (tasks, languages, folders), in this order
    clients: int | None = None  # keep only the first so many clients, after `groups` and `partition`
    sample_clients: bool = False  # keep `clients` drawn at random instead of the first
    max_length: int = 512  # in tokens, prompt and response together; longer examples are skipped and counted
    template: str = "alpaca-short"  # alpaca | alpaca-short | plain | chat
    loss_on: str = "response"  # response | all: which tokens count in the loss
    validation: float = 0.1  # share of each client's training examples held out, where the data has no validation split
    image_size: int | None = None  # images: height and width in pixels; null: as the data has them, all of one size
    noise: float = 0.0  # images: share of the clients' training labels replaced by a class drawn at random
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class LocalConfig:
    """One client's training within one round."""

    steps: int | None = 20  # optimizer steps; null: `epochs` counts
    epochs: int | None = None
    batch_size: int = 4  # examples per optimizer step and client
    lr: float = 5e-5  # in the first round
    lr_end: float = 5e-6  # in the last round; linear in between
    optimizer: str = "adamw"  # adamw | adam | sgd
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0
    clip: float | None = None  # largest gradient norm per client
    proximal: float = 0.0  # lambda of lambda * ||theta - theta_start||^2 in the loss, whatever the method
    augment: str | None = None  # images: crop (each shifted by up to an eighth of its sides) | crop-flip (and mirrored)


@dataclass(frozen=True)
class DelayConfig:
    """How late the clients' answers are, in rounds; by default every answer arrives in the round that asked for it."""

    sigma: float = 0.0  # an answer is floor(|N(0, sigma)|) rounds late; a client at work is not asked again
    per: str = "upload"  # upload | client: whether each answer draws its delay, or each client once
    drop_out: float = 0.0  # probability that an answer never arrives


@dataclass(frozen=True)
class TransportConfig:
    """In which form the numbers of states travel: float16 | bfloat16 | int8; null: as they are. See `wire.pack`."""

    up: str | None = None  # what clients upload
    down: str | None = None  # what they are sent; they compute from what arrives


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy at the client level; off without `clip`. See `federation/privacy.py`."""

    clip: float | None = None  # C: the largest Euclidean norm of an upload; longer ones are scaled down to it
    noise: float = 0.0  # noise multiplier: Gaussian noise of standard deviation noise * clip on every number
    # server: on the sum of the uploads (central; each client is then asked with probability `participation` by itself,
    # and the server only uses the mean) | client: on each upload (local)
    where: str = "server"
    delta: float = 1e-5  # for which epsilon is given


@dataclass(frozen=True)
class NetworkConfig:
    """Clients on other machines (`llm-fed flower`), where time is real."""

    # Who takes part: their names, in the order in which they are summed, or how many; their names are then sorted.
    clients: tuple[str, ...] | int = 1
    deadline: float = 600.0  # seconds after which a round, or an evaluation, ends without those that have not answered
    enough: int | None = None  # a round ends with so many answers; null: when everybody whom it asked has answered
    patience: float = 3600.0  # seconds after which an answer is no longer waited for, and its client is asked again


@dataclass(frozen=True)
class EvalConfig:
    """When and how clients are scored."""

    every: int = 10  # rounds between validation scores; the last round is always scored; 0: only the last
    # rouge1 | rouge2 | rougeL | exact_match | option_accuracy | commonsense_accuracy | squad_f1 | squad_em
    # accuracy (of image tasks)
    metric: str | None = None  # null: the task's own
    limit: int | None = None  # at most this many examples per client and split
    batch_size: int = 32  # rows per generation batch, of any clients
    max_new_tokens: int = 128
    # best: test the round with the best score during training; of equal scores that with the lowest loss, and of equal
    # losses the last one | last
    select: str = "best"
    during: str = "validation"  # validation | test: the split that is scored during training
    of_last: int | None = None  # best: only of so many last scores; null: of all
    # Also score the base without any adapter, as round 0 on the split of `during` and once more on the test split.
    base: bool = False


@dataclass(frozen=True)
class ExportConfig:
    """Whose personal model is written at the end; scores are of all clients in any case."""

    # all | none | names of clients | seen: those of which an answer had arrived by the round that is exported; of a
    # method that merges other runs, in one of these
    clients: tuple[str, ...] | str = "all"


@dataclass(frozen=True)
class CheckpointConfig:
    """What of a run stays on disk."""

    every: int = 1  # rounds
    keep: int = 2  # newest checkpoints kept; the best round is kept too
    keep_rounds: tuple[int, ...] = ()  # rounds kept for ever
    memory_limit: float = 4.0  # GiB of RAM for what is kept of single clients; the rest lies in the run folder


@dataclass(frozen=True)
class TrackConfig:
    """Experiment trackers, through Accelerate."""

    with_: tuple[str, ...] = ()  # tensorboard, wandb
    project: str = "llm_fed"


@dataclass(frozen=True)
class Config:
    """A whole run. `llm-fed run CONFIG.yaml key=value` resolves to one of these and saves it with the run."""

    seed: int = 0
    rounds: int = 50
    participation: float = 1.0  # share of the clients asked each round, of those that are not at work
    clients_per_pass: int | str = "auto"  # how many clients are trained in one fused pass; 1: one after another
    # Uploads whose norm is over so many times the median of those that arrive in the round are refused; null: only
    # those with NaN or infinite values.
    norm_bound: float | None = 10.0
    device: str = "auto"  # auto | cpu | cuda
    base: BaseConfig = field(default_factory=BaseConfig)
    adapter: AdapterConfig | None = field(default_factory=AdapterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedmerge"})
    local: LocalConfig = field(default_factory=LocalConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)


def check(config: Config) -> None:
    """Refuse a value out of range, naming the key.

    Raises:
        UserError: the first bad value, and what it must be.
    """

    def require(good: bool, key: str, what: str) -> None:
        if not good:
            value = config
            for part in key.split("."):
                value = getattr(value, part)
            raise UserError(f"{key} is {value!r}; it must be {what}")

    def one_of(key: str, *values: Any) -> None:
        section, name = key.rsplit(".", 1) if "." in key else ("", key)
        value = getattr(getattr(config, section) if section else config, name)
        if value is not None or None not in values:
            known(key, value, [str(item) for item in values if item is not None])

    require(config.rounds >= 1, "rounds", "at least 1")
    require(0 < config.participation <= 1, "participation", "above 0 and at most 1")
    per_pass = config.clients_per_pass
    require(
        per_pass == "auto" or (isinstance(per_pass, int) and per_pass >= 1), "clients_per_pass", "auto or at least 1"
    )
    require(config.norm_bound is None or config.norm_bound > 1, "norm_bound", "above 1, or null")
    one_of("device", "auto", "cpu", "cuda")
    one_of("base.dtype", "auto", "float32", "bfloat16", "float16")
    one_of("base.quantization", None, "nf4", "int8")
    one_of("base.device_map", None, "auto")
    if config.adapter is not None:
        require(config.adapter.rank >= 1, "adapter.rank", "at least 1")
        require(config.adapter.alpha > 0, "adapter.alpha", "above 0")
        require(0 <= config.adapter.dropout < 1, "adapter.dropout", "at least 0 and below 1")
        require(len(config.adapter.target_modules) > 0, "adapter.target_modules", "at least one module name")
    require(config.task.clients is None or config.task.clients >= 1, "task.clients", "at least 1, or null for all")
    require(config.task.clients is not None or not config.task.sample_clients, "task.clients",
            "a number with task.sample_clients")  # fmt: skip
    require(config.task.image_size is None or config.task.image_size >= 1, "task.image_size", "at least 1, or null")
    require(0 <= config.task.noise <= 1, "task.noise", "at least 0 and at most 1")
    test, server = config.task.partition.test, config.task.server
    require(test is None or 0 < test < 1, "task.partition.test", "above 0 and below 1, or null")
    require(test is None or not server.test, "task.partition.test", "null with task.server.test: no client is tested")
    require(server.examples is None or server.examples >= 0, "task.server.examples", "at least 0, or null")
    if server.name is None:
        require(server.examples is not None, "task.server.examples", "a number, unless task.server.name is given")
        require(server.path is None, "task.server.path", "null, unless task.server.name is given")
    else:
        require(server.examples != 0, "task.server.examples", "at least 1 with task.server.name, or null for all")
        require(not server.each, "task.server.each", "false with task.server.name")
    require(config.task.max_length >= 2, "task.max_length", "at least 2 tokens")
    require(0 <= config.task.validation < 1, "task.validation", "at least 0 and below 1")
    one_of("task.template", "alpaca", "alpaca-short", "plain", "chat")
    one_of("task.loss_on", "response", "all")
    require((config.local.steps is None) != (config.local.epochs is None), "local.steps",
            "a number while local.epochs is null, or null while local.epochs is a number")  # fmt: skip
    require(config.local.steps is None or config.local.steps >= 1, "local.steps", "at least 1")
    require(config.local.epochs is None or config.local.epochs >= 1, "local.epochs", "at least 1")
    require(config.local.batch_size >= 1, "local.batch_size", "at least 1")
    require(0 < config.local.lr < math.inf, "local.lr", "above 0 and finite")
    require(0 <= config.local.lr_end < math.inf, "local.lr_end", "at least 0 and finite")
    one_of("local.optimizer", "adamw", "adam", "sgd")
    require(config.local.clip is None or config.local.clip > 0, "local.clip", "above 0, or null")
    require(0 <= config.local.proximal < math.inf, "local.proximal", "at least 0 and finite")
    require(0 <= config.local.momentum < 1, "local.momentum", "at least 0 and below 1")
    require(
        not config.local.momentum or config.local.optimizer == "sgd",
        "local.momentum",
        "0 unless local.optimizer is sgd",
    )
    require(0 <= config.local.weight_decay < math.inf, "local.weight_decay", "at least 0 and finite")
    one_of("local.augment", None, "crop", "crop-flip")
    require(0 <= config.delay.sigma < math.inf, "delay.sigma", "at least 0 and finite")
    one_of("delay.per", "upload", "client")
    require(0 <= config.delay.drop_out < 1, "delay.drop_out", "at least 0 and below 1")
    for key in ("transport.up", "transport.down"):
        one_of(key, None, "float16", "bfloat16", "int8")
    clip = config.privacy.clip
    require(clip is None or 0 < clip < math.inf, "privacy.clip", "above 0 and finite, or null")
    require(0 <= config.privacy.noise < math.inf, "privacy.noise", "at least 0 and finite")
    require(clip is not None or not config.privacy.noise, "privacy.clip", "a number with privacy.noise")
    one_of("privacy.where", "server", "client")
    require(0 < config.privacy.delta < 1, "privacy.delta", "above 0 and below 1")
    network = config.network
    require(bool(network.clients) and (not isinstance(network.clients, int) or network.clients >= 1),
            "network.clients", "names, or a number of at least 1")  # fmt: skip
    require(0 < network.deadline < math.inf, "network.deadline", "above 0 and finite, in seconds")
    require(network.enough is None or network.enough >= 1, "network.enough", "at least 1, or null for all")
    require(network.deadline <= network.patience < math.inf, "network.patience",
            "at least network.deadline and finite, in seconds")  # fmt: skip
    require(config.eval.every >= 0, "eval.every", "at least 0")
    require(config.eval.limit is None or config.eval.limit >= 1, "eval.limit", "at least 1, or null")
    require(config.eval.batch_size >= 1, "eval.batch_size", "at least 1")
    require(config.eval.max_new_tokens >= 1, "eval.max_new_tokens", "at least 1")
    one_of("eval.select", "best", "last")
    one_of("eval.during", "validation", "test")
    require(config.eval.of_last is None or config.eval.of_last >= 1, "eval.of_last", "at least 1, or null")
    exported = config.export.clients
    require(exported in ("all", "seen", "none") if isinstance(exported, str) else bool(exported), "export.clients",
            "all, seen, none, or names in brackets such as [anna,bert]")  # fmt: skip
    require(config.checkpoint.every >= 1, "checkpoint.every", "at least 1")
    require(config.checkpoint.keep >= 1, "checkpoint.keep", "at least 1")
    require(config.checkpoint.memory_limit >= 0, "checkpoint.memory_limit", "at least 0")
    require("name" in config.method, "method", "a mapping with the method's name")
