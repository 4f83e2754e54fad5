"""The configuration of a run: frozen dataclasses whose fields carry their defaults and ranges (`llm_fed.settings`), and
the check of what relates two of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from llm_fed.errors import UserError, did_you_mean, one_line
from llm_fed.settings import (
    Above,
    AtLeast,
    AtMost,
    Below,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Encoding = Literal["float16", "bfloat16", "int8"]  # of the numbers of a state when it is sent


TEMPLATES = ("alpaca", "alpaca-short", "plain", "chat")  # of prompts, by name, see `tasks.common`


@dataclass(frozen=True)
class BaseConfig:
    """The base model. Adapters leave it frozen."""

    name: str = "meta-llama/Llama-3.2-3B-Instruct"  # a Hub id or a folder; for images also cnn, cnn-1 ... resnet-9 ...
    # Image models of the clients instead of `name`, assigned to the clients in turn (cnn-1 ... cnn-5, resnet-9 ...);
    # `name` is then the small shared model of methods that have one.
    clients: tuple[str, ...] | None = None
    # dtype of the base's weights and of autocast in training;
    # auto: bfloat16 on a GPU that supports it, else float32; a continued run keeps the dtype with which it began
    dtype: Dtype = "auto"
    quantization: Literal["nf4", "int8"] | None = None  # of the base's weights, by bitsandbytes
    # auto: spread the layers of a language model over all GPUs of one process (Accelerate)
    device_map: Literal["auto"] | None = None
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, ~1/3 more time
    revision: str | None = None  # a Hub revision


@dataclass(frozen=True)
class AdapterConfig:
    """The LoRA adapter that clients train (Hu et al. 2022); `adapter: null` trains a whole image model."""

    # r: rows of A, columns of B. For methods that allow unequal ranks (docs/guide.md), also a list of ranks in the
    # clients' order, or {client: rank, ...} for all clients.
    rank: Annotated[PositiveInt, AtMost(2**16)] | tuple[int, ...] | dict[str, int] = 8
    alpha: PositiveFloat = 16  # the adapter's output is scaled by alpha / rank, the client's own
    rslora: bool = False  # scale by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023)
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.05  # dropout probability of an adapter's inputs in training
    # the layers to adapt: last parts of module names, or one regular expression for whole names
    target_modules: Annotated[tuple[str, ...] | str, NonEmpty("at least one module name")] = (
        "q_proj", "v_proj",
    )  # fmt: skip
    # Start from these adapters instead of new ones: a finished run's folder, a folder with one PEFT folder per client,
    # or one PEFT folder; see `start.give`.
    start: str | None = None


@dataclass(frozen=True)
class ColumnsConfig:
    """Column names of a user's own files; `null` lets the task look for the usual names."""

    prompt: str | None = None  # usual names: instruction, prompt, question, input
    input: str | None = None  # optional context that is put after the prompt
    answer: str | None = None  # usual names: output, response, answer, completion, target, generated
    options: str | None = None  # a list of strings, for option scoring
    client: str | None = None  # the client id, if one file holds all clients
    # conversations, instead of prompt and answer (usual names: messages, conversations); see `tasks.conversations`
    messages: str | None = None


@dataclass(frozen=True)
class PartitionConfig:
    """How examples are divided among clients, if the data has no clients of its own."""

    # natural (folders, tasks, or columns.client) | split (each natural client into several) | iid | dirichlet |
    # pathological (some labels per client) | cluster (some labels per cluster of clients)
    kind: str = "natural"
    # iid, dirichlet, pathological: how many clients; split: how many per natural client
    clients: PositiveInt | None = None
    alpha: PositiveFloat = 0.5  # dirichlet, pathological: concentration
    classes: PositiveInt | None = None  # pathological: number of labels per client
    # cluster: number of clients in each cluster
    sizes: Annotated[tuple[PositiveInt, ...], NonEmpty("a number for each cluster")] | None = None
    label: str | None = None  # to divide text by label: the column that holds the label
    # pool train and test examples, and hold out this share of each client's examples as its test split
    test: Annotated[float, Above(0), Below(1)] | None = None


@dataclass(frozen=True)
class ServerConfig:
    """The server's own examples; by default it has none."""

    # how many, taken at random from the task's test split, or from the training split of `name`
    examples: NonNegativeInt | None = 0
    each: bool = False  # `examples` of each natural client (task, language, folder) instead of in total
    name: str | None = None  # another task: out-of-domain data; `examples` may then be null for all
    path: str | None = None  # the data of that task, as in task.path
    test: bool = False  # the rest of the test split stays at the server, which tests the global model on it


@dataclass(frozen=True)
class TaskConfig:
    """The data, and how it becomes text or inputs of an image model."""

    name: str = "flan"  # see docs/tasks.md
    path: str | None = None  # a folder with one folder per client, one file with a client column, or hf://owner/name
    groups: tuple[str, ...] | None = None  # keep only these natural clients (tasks, languages, folders), in this order
    # keep only this many clients (the first ones), after `groups` and `partition`
    clients: Annotated[PositiveInt | None, "for all"] = None
    sample_clients: bool = False  # keep `clients` drawn at random instead of the first
    max_length: Annotated[int, AtLeast(2), "in tokens"] = 512  # prompt and response together
    # Longer examples. skip: they are left out and counted; cut-end: the end of the response is cut off; cut-start: the
    # start of the prompt is cut off, also in evaluation
    too_long: Literal["skip", "cut-end", "cut-start"] = "skip"
    # alpaca | alpaca-short | plain | chat (the tokenizer's own), or a text with {prompt} in the prompt's place
    template: str = "alpaca-short"
    loss_on: Literal["response", "all"] = "response"  # which tokens count in the loss
    # share of each client's training examples to hold out, if the data has no validation split
    validation: Annotated[float, AtLeast(0), Below(1)] = 0.1
    image_size: PositiveInt | None = None  # images: height and width in pixels; null: as in the data, all of one size
    # images: the names of all classes in order, if one machine's data may lack some; null: as in the data
    labels: Annotated[tuple[str, ...] | None, NonEmpty("names")] = None
    # images: share of the clients' training labels replaced by a class drawn at random
    noise: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class LocalConfig:
    """One client's training within one round."""

    steps: PositiveInt | None = 20  # optimizer steps; null: use `epochs`
    epochs: PositiveInt | None = None  # passes over the training examples, instead of steps
    batch_size: PositiveInt = 4  # examples per optimizer step and client
    lr: PositiveFloat = 5e-5  # learning rate in the first round
    lr_end: NonNegativeFloat = 5e-6  # learning rate in the last round
    schedule: Literal["linear", "cosine"] = "linear"  # how the rate goes from `lr` to `lr_end` over the rounds
    warmup_rounds: NonNegativeInt = 0  # rounds at the start in which the rate rises linearly to `lr`
    # how the rate falls from the round's rate to zero over the optimizer steps of each round
    decay: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # steps at the start of each round in which the rate rises to the round's rate
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"  # of the client
    # Whether each client keeps its optimizer's moments from round to round (for methods that train once per round);
    # otherwise they are reset in each round.
    keep_optimizer: bool = False
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.0  # of sgd
    weight_decay: NonNegativeFloat = 0.0  # decoupled for adamw, part of the gradient for adam and sgd
    clip: PositiveFloat | None = None  # largest gradient norm per client
    proximal: NonNegativeFloat = 0.0  # lambda of lambda * ||theta - theta_start||^2 in the loss, with any method
    # regular expression of entries that are not trained, e.g. '^classifier' for an image model's initial head
    freeze: str | None = None
    # images: crop (each shifted by up to an eighth of its sides), crop-flip (and mirrored)
    augment: Literal["crop", "crop-flip"] | None = None


@dataclass(frozen=True)
class DelayConfig:
    """How late the clients' answers are, in rounds; by default every answer arrives in the round that asked for it."""

    sigma: NonNegativeFloat = 0.0  # an answer is floor(|N(0, sigma)|) rounds late; a busy client is not sampled
    per: Literal["upload", "client"] = "upload"  # whether a delay is drawn for each answer, or once for each client
    drop_out: Annotated[float, AtLeast(0), Below(1)] = 0.0  # probability that an answer never arrives


@dataclass(frozen=True)
class TransportConfig:
    """The number format in which states are sent; null: unchanged. See `wire.pack`."""

    up: Encoding | None = None  # for uploads
    down: Encoding | None = None  # for what clients receive; they compute with the values that arrive


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy; off without `clip`. See `federation/privacy.py`."""

    # What is protected. client: participation, or all data of a client | example: each training example of a client,
    # by noise in every optimizer step (DP-SGD)
    unit: Literal["client", "example"] = "client"
    # C: the largest Euclidean norm of an upload, or of an example's gradient; longer ones are scaled down to it
    clip: PositiveFloat | None = None
    noise: NonNegativeFloat = 0.0  # noise multiplier: Gaussian noise of standard deviation noise * clip on every number
    # For unit client: where noise is added. server: to the sum of the uploads (central; each client is then sampled
    # independently with probability `participation`) | client: to each upload (local)
    where: Literal["server", "client"] = "server"
    delta: Annotated[float, Above(0), Below(1)] = 1e-5  # the delta for which epsilon is reported


@dataclass(frozen=True)
class ServerStepConfig:
    """How the server averages what clients send: see `merge/robust.py` and docs/robust.md."""

    aggregation: Literal[
        "mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping"
    ] = "mean"
    # For all rules but the mean: the share of the uploads that may be false, and the largest share of one client.
    liars: Annotated[float, Above(0), Below(0.5)] = 0.2
    # for centered-clipping: the distance from the centre up to which an upload counts in full
    radius: Annotated[PositiveFloat | None, "for the median norm of the uploads"] = None


@dataclass(frozen=True)
class NetworkConfig:
    """Clients on other machines (`llm-fed flower`), where time is real."""

    # The names of the clients, in the order in which they are summed, or their number; names are then sorted.
    # A client is at the node that is registered under its name; client@node names another node.
    clients: Annotated[tuple[str, ...], NonEmpty("names")] | PositiveInt = 1
    # time after which a round, or an evaluation, ends without the missing answers
    deadline: Annotated[PositiveFloat, "in seconds"] = 600.0
    # number of answers that ends a round; null: those of all sampled clients
    enough: Annotated[PositiveInt | None, "for all"] = None
    # time after which an answer is given up, and its client may be sampled again
    patience: Annotated[PositiveFloat, "in seconds"] = 3600.0
    # the most examples of one client that count in means, as a multiple of the median over all clients
    weight_bound: Annotated[float | None, AtLeast(1), "for any number"] = 10.0


@dataclass(frozen=True)
class EvalConfig:
    """When and how clients are scored."""

    every: NonNegativeInt = 10  # rounds between validation scores; the last round is always scored; 0: only the last
    # rouge1 | rouge2 | rougeL | exact_match | option_accuracy | commonsense_accuracy | squad_f1 | squad_em
    # accuracy (of image tasks)
    metric: str | None = None  # null: the task's own
    limit: PositiveInt | None = None  # at most this many examples per client and split
    batch_size: PositiveInt = 32  # prompts per generation batch, of any clients
    max_new_tokens: PositiveInt = 128  # longest answer in tokens
    # Which round is tested. best: the round with the best score during training; among equal scores the lowest loss,
    # and among equal losses the last round
    select: Literal["best", "last"] = "best"
    during: Literal["validation", "test"] = "validation"  # the split that is scored during training
    of_last: PositiveInt | None = None  # best: only consider this many last scores; null: all
    # Also score the base without an adapter: as round 0 on the split `during`, and on the test split.
    base: bool = False


@dataclass(frozen=True)
class ExportConfig:
    """Which clients' personal models are written at the end. All clients are scored in any case."""

    # seen: clients whose answer had arrived by the exported round; for a method that merges other runs, in one of
    # these
    clients: (
        Literal["all", "seen", "none"] | Annotated[tuple[str, ...], NonEmpty("names in brackets such as [anna,bert]")]
    ) = "all"


@dataclass(frozen=True)
class ReportConfig:
    """What report.html shows."""

    # test examples per client with the answers of base and model, for the first 50 clients; none with privacy.clip
    samples: NonNegativeInt = 5


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints of a run are kept on disk."""

    every: PositiveInt = 1  # rounds between checkpoints
    keep: PositiveInt = 2  # how many of the newest checkpoints to keep; the best round is always kept
    keep_rounds: tuple[int, ...] = ()  # rounds whose checkpoints are always kept
    # GiB of RAM for the state of single clients; the rest is kept in the run folder
    memory_limit: NonNegativeFloat = 4.0


@dataclass(frozen=True)
class TrackConfig:
    """Experiment trackers, through Accelerate."""

    with_: tuple[str, ...] = ()  # tensorboard, wandb
    project: str = "llm_fed"  # the project name in the tracker


@dataclass(frozen=True)
class SeedsConfig:
    """Separate seeds for parts of a run; null: `seed`."""

    # the clients and their data: a task's draws, task.partition, clients drawn at random, label noise, the server's
    # examples
    federation: int | None = None
    # initialisation, batches, dropout, sampling of clients, delays, noise of differential privacy
    training: int | None = None
    # which of a client's examples become its test and validation split, if the data has none; if given, also which
    # ones eval.limit keeps (null: the first)
    evaluation: int | None = None


@dataclass(frozen=True)
class Config:
    """A whole run. `llm-fed run CONFIG.yaml key=value` resolves to one of these and saves it with the run."""

    seed: int = 0  # of all random numbers, unless `seeds` says otherwise
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    rounds: Annotated[PositiveInt, AtMost(1_000_000)] = 50  # communication rounds, each with one server step
    # share of the clients sampled in each round, out of those that are not busy
    participation: Annotated[float, Above(0), AtMost(1)] = 1.0
    # how many clients are trained in one fused pass; 1: one after another
    clients_per_pass: Literal["auto"] | PositiveInt = "auto"
    # Uploads are refused if their norm exceeds this multiple of the round's median norm; null: only those with NaN or
    # infinite values are refused.
    norm_bound: Annotated[float, Above(1)] | None = 10.0
    device: Device = "auto"  # auto: a GPU if there is one
    base: BaseConfig = field(default_factory=BaseConfig)
    adapter: AdapterConfig | None = field(default_factory=AdapterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedmerge"})  # its name and settings
    local: LocalConfig = field(default_factory=LocalConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    server: ServerStepConfig = field(default_factory=ServerStepConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    @property
    def federation_seed(self) -> int:
        return self.seed if self.seeds.federation is None else self.seeds.federation

    @property
    def training_seed(self) -> int:
        return self.seed if self.seeds.training is None else self.seeds.training

    @property
    def evaluation_seed(self) -> int:
        return self.seed if self.seeds.evaluation is None else self.seeds.evaluation

    @property
    def seed_name(self) -> str:
        """For the names of folders: `seed0`, or `seed0-federation3` where that has a seed of its own."""
        own = (f"-{part}{seed}" for part, seed in vars(self.seeds).items() if seed is not None)
        return f"seed{self.seed}{''.join(own)}"


def check(config: Config) -> None:
    """Refuse values that are not what their fields say, and those that do not go together, naming the key.

    Raises:
        UserError: the first bad value, and what it must be.
    """
    check_fields(config, "")

    def require(good: bool, key: str, what: str) -> None:
        if not good:
            value = config
            for part in key.split("."):
                value = getattr(value, part)
            raise UserError(f"{key} is {value!r}; it must be {what}")

    require(config.task.clients is not None or not config.task.sample_clients, "task.clients",
            "a number with task.sample_clients")  # fmt: skip
    test, server = config.task.partition.test, config.task.server
    require(test is None or not server.test, "task.partition.test", "null with task.server.test: no client is tested")
    if server.name is None:
        require(server.examples is not None, "task.server.examples", "a number, unless task.server.name is given")
        require(server.path is None, "task.server.path", "null, unless task.server.name is given")
    else:
        require(server.examples != 0, "task.server.examples", "at least 1 with task.server.name, or null for all")
        require(not server.each, "task.server.each", "false with task.server.name")
    template = config.task.template
    if template not in TEMPLATES and template.count("{prompt}") != 1:
        raise UserError(
            f"task.template={one_line(repr(template))} is unknown{did_you_mean(template, TEMPLATES)}; known: "
            f"{', '.join(TEMPLATES)}, or a text of your own that has {{prompt}} in it once"
        )
    require(config.local.warmup_rounds < config.rounds, "local.warmup_rounds", "below rounds")
    require((config.local.steps is None) != (config.local.epochs is None), "local.steps",
            "a number while local.epochs is null, or null while local.epochs is a number")  # fmt: skip
    require(not config.local.momentum or config.local.optimizer == "sgd", "local.momentum",
            "0 unless local.optimizer is sgd")  # fmt: skip
    kept = config.local.optimizer != "sgd" or config.local.momentum
    require(not config.local.keep_optimizer or bool(kept), "local.keep_optimizer", "false with sgd without momentum, "
            "which has nothing to keep")  # fmt: skip
    require(config.privacy.clip is not None or not config.privacy.noise, "privacy.clip", "a number with privacy.noise")
    require(config.privacy.clip is not None or config.privacy.unit == "client", "privacy.clip",
            "a number with privacy.unit=example")  # fmt: skip
    require(config.server.radius is None or config.server.aggregation == "centered-clipping", "server.radius",
            "null unless server.aggregation is centered-clipping")  # fmt: skip
    network = config.network
    require(network.deadline <= network.patience, "network.patience",
            "at least network.deadline and finite, in seconds")  # fmt: skip
    require("name" in config.method, "method", "a mapping with the method's name")
