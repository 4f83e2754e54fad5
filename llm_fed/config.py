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
Encoding = Literal["float16", "bfloat16", "int8"]  # of the numbers of a state on its way


TEMPLATES = ("alpaca", "alpaca-short", "plain", "chat")  # of prompts, by name, see `tasks.common`


@dataclass(frozen=True)
class BaseConfig:
    """The model that everything starts from; under adapters it is frozen."""

    name: str = "meta-llama/Llama-3.2-3B-Instruct"  # a Hub id or a folder; of images also cnn, cnn-1 ... resnet-9 ...
    # Image models that clients have in the place of `name`, one after another in turn (cnn-1 ... cnn-5, resnet-9 ...);
    # `name` is then the small model of methods that share one.
    clients: tuple[str, ...] | None = None
    # of the base's weights and the autocast of training;
    # auto: bfloat16 on a GPU that has it, else float32; a run keeps what it began with
    dtype: Dtype = "auto"
    quantization: Literal["nf4", "int8"] | None = None  # by bitsandbytes
    # auto: the layers of a language model over all GPUs of one process (Accelerate)
    device_map: Literal["auto"] | None = None
    activation_checkpointing: bool = False  # recompute activations in the backward pass: less memory, ~1/3 more time
    revision: str | None = None  # a Hub revision


@dataclass(frozen=True)
class AdapterConfig:
    """The LoRA adapter that clients train (Hu et al. 2022); `adapter: null` trains a whole image model."""

    # r: rows of A, columns of B. Where a method takes clients of unequal rank (docs/guide.md), also a list of ranks in
    # the clients' order, or {client: rank, ...} of all of them.
    rank: Annotated[PositiveInt, AtMost(2**16)] | tuple[int, ...] | dict[str, int] = 8
    alpha: PositiveFloat = 16  # the adapter's output is scaled by alpha / rank, the client's own
    rslora: bool = False  # by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023)
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.05  # share of an adapter's inputs left out in training
    # last parts of module names, or one regular expression
    target_modules: Annotated[tuple[str, ...] | str, NonEmpty("at least one module name")] = (
        "q_proj", "v_proj",
    )  # fmt: skip
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
    # conversations, in the place of prompt and answer (usual names: messages, conversations); see `tasks.conversations`
    messages: str | None = None


@dataclass(frozen=True)
class PartitionConfig:
    """How examples become clients, where the data does not say it by itself."""

    # natural (folders, tasks, or columns.client) | split (k clients per natural one) | iid | dirichlet | pathological
    # (some labels each) | cluster (a part of the labels for each cluster of clients)
    kind: str = "natural"
    # iid, dirichlet, pathological: how many clients; split: how many per natural client
    clients: PositiveInt | None = None
    alpha: PositiveFloat = 0.5  # dirichlet, pathological: concentration
    classes: PositiveInt | None = None  # pathological: how many labels a client holds
    # cluster: how many clients each cluster has
    sizes: Annotated[tuple[PositiveInt, ...], NonEmpty("a number for each cluster")] | None = None
    label: str | None = None  # of text by label: the column that holds it
    # pool train and test, and make this share of what each client got its test split
    test: Annotated[float, Above(0), Below(1)] | None = None


@dataclass(frozen=True)
class ServerConfig:
    """The server's own examples; by default it has none."""

    # taken at random from the task's test split, or from the training split of `name`
    examples: NonNegativeInt | None = 0
    each: bool = False  # `examples` of each natural client (task, language, folder) instead of in total
    name: str | None = None  # another task: out-of-domain data; `examples` may then be null for all
    path: str | None = None  # where that task lies, as in task.path
    test: bool = False  # the rest of the test split stays at the server, where one model for all is tested


@dataclass(frozen=True)
class TaskConfig:
    """Whose examples, and how they become text or inputs of an image model."""

    name: str = "flan"  # see docs/tasks.md
    path: str | None = None  # a folder with one folder per client, one file with a client column, or hf://owner/name
    groups: tuple[str, ...] | None = None  # keep only these natural clients (tasks, languages, folders), in this order
    # keep only the first so many clients, after `groups` and `partition`
    clients: Annotated[PositiveInt | None, "for all"] = None
    sample_clients: bool = False  # keep `clients` drawn at random instead of the first
    max_length: Annotated[int, AtLeast(2), "in tokens"] = 512  # prompt and response together
    # What becomes of longer examples. skip: they are left out and counted; cut-end: what is over is cut off the
    # response; cut-start: off the prompt, also when it is asked
    too_long: Literal["skip", "cut-end", "cut-start"] = "skip"
    # alpaca | alpaca-short | plain | chat (the tokenizer's own), or a text with {prompt} in the prompt's place
    template: str = "alpaca-short"
    loss_on: Literal["response", "all"] = "response"  # which tokens count in the loss
    # share of each client's training examples held out, where the data has no validation split
    validation: Annotated[float, AtLeast(0), Below(1)] = 0.1
    image_size: PositiveInt | None = None  # images: height and width in pixels; null: as in the data, all of one size
    # images: the names of all classes in their order, where one machine's data may lack some; null: the data's own
    labels: Annotated[tuple[str, ...] | None, NonEmpty("names")] = None
    # images: share of the clients' training labels replaced by a class drawn at random
    noise: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class LocalConfig:
    """One client's training within one round."""

    steps: PositiveInt | None = 20  # optimizer steps; null: `epochs` counts
    epochs: PositiveInt | None = None  # passes over the training examples, in the place of steps
    batch_size: PositiveInt = 4  # examples per optimizer step and client
    lr: PositiveFloat = 5e-5  # in the first round
    lr_end: NonNegativeFloat = 5e-6  # in the last round
    schedule: Literal["linear", "cosine"] = "linear"  # how the rate goes from `lr` to `lr_end` over the rounds
    warmup_rounds: NonNegativeInt = 0  # before that, rounds in which it rises to `lr` in even steps
    # of the rate over the optimizer steps of each round, from the round's own rate down to zero
    decay: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # before that, steps of each round in which it rises to the round's own rate
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"  # of the client
    # Whether each client keeps its optimizer's moments from round to round, of methods that train once in a round; else
    # it starts anew in each round.
    keep_optimizer: bool = False
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.0  # of sgd
    weight_decay: NonNegativeFloat = 0.0  # apart from the gradient for adamw, part of it for adam and sgd
    clip: PositiveFloat | None = None  # largest gradient norm per client
    proximal: NonNegativeFloat = 0.0  # lambda of lambda * ||theta - theta_start||^2 in the loss, whatever the method
    # regular expression of entries that no client trains, e.g. '^classifier' for an image model's head as it was drawn
    freeze: str | None = None
    # images: crop (each shifted by up to an eighth of its sides), crop-flip (and mirrored)
    augment: Literal["crop", "crop-flip"] | None = None


@dataclass(frozen=True)
class DelayConfig:
    """How late the clients' answers are, in rounds; by default every answer arrives in the round that asked for it."""

    sigma: NonNegativeFloat = 0.0  # an answer is floor(|N(0, sigma)|) rounds late; a client at work is not asked again
    per: Literal["upload", "client"] = "upload"  # whether each answer draws its delay, or each client once
    drop_out: Annotated[float, AtLeast(0), Below(1)] = 0.0  # probability that an answer never arrives


@dataclass(frozen=True)
class TransportConfig:
    """In which form the numbers of states travel; null: as they are. See `wire.pack`."""

    up: Encoding | None = None  # what clients upload
    down: Encoding | None = None  # what they are sent; they compute from what arrives


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy; off without `clip`. See `federation/privacy.py`."""

    # What is hidden. client: who takes part, or all data of a client | example: each training example of a client, by
    # noise in every optimizer step (DP-SGD)
    unit: Literal["client", "example"] = "client"
    # C: the largest Euclidean norm of an upload, or of an example's gradient; longer ones are scaled down to it
    clip: PositiveFloat | None = None
    noise: NonNegativeFloat = 0.0  # noise multiplier: Gaussian noise of standard deviation noise * clip on every number
    # Of unit client. server: on the sum of the uploads (central; each client is then asked with probability
    # `participation` by itself, and the server only uses the mean) | client: on each upload (local)
    where: Literal["server", "client"] = "server"
    delta: Annotated[float, Above(0), Below(1)] = 1e-5  # for which epsilon is given


@dataclass(frozen=True)
class ServerStepConfig:
    """How the server takes means of what clients send: see `merge/robust.py` and docs/robust.md."""

    aggregation: Literal[
        "mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping"
    ] = "mean"
    # Not of the mean: the share of the uploads that may be lies, and the most that one client counts for.
    liars: Annotated[float, Above(0), Below(0.5)] = 0.2
    # of centered-clipping: how far from the centre an upload counts in full
    radius: Annotated[PositiveFloat | None, "for the median norm of the uploads"] = None


@dataclass(frozen=True)
class NetworkConfig:
    """Clients on other machines (`llm-fed flower`), where time is real."""

    # Who takes part: their names, in the order in which they are summed, or how many; their names are then sorted.
    # A client is at the node that is registered under its name; client@node says another one.
    clients: Annotated[tuple[str, ...], NonEmpty("names")] | PositiveInt = 1
    # after which a round, or an evaluation, ends without those that have not answered
    deadline: Annotated[PositiveFloat, "in seconds"] = 600.0
    # a round ends with so many answers; null: when everybody whom it asked has answered
    enough: Annotated[PositiveInt | None, "for all"] = None
    # after which an answer is no longer waited for, and its client is asked again
    patience: Annotated[PositiveFloat, "in seconds"] = 3600.0
    # examples of one client that count in means, as a multiple of the median over all clients
    weight_bound: Annotated[float | None, AtLeast(1), "for any number"] = 10.0


@dataclass(frozen=True)
class EvalConfig:
    """When and how clients are scored."""

    every: NonNegativeInt = 10  # rounds between validation scores; the last round is always scored; 0: only the last
    # rouge1 | rouge2 | rougeL | exact_match | option_accuracy | commonsense_accuracy | squad_f1 | squad_em
    # accuracy (of image tasks)
    metric: str | None = None  # null: the task's own
    limit: PositiveInt | None = None  # at most this many examples per client and split
    batch_size: PositiveInt = 32  # rows per generation batch, of any clients
    max_new_tokens: PositiveInt = 128  # of an answer
    # Which round is tested. best: that with the best score during training; of equal scores that with the lowest loss,
    # and of equal losses the last one
    select: Literal["best", "last"] = "best"
    during: Literal["validation", "test"] = "validation"  # the split that is scored during training
    of_last: PositiveInt | None = None  # best: only of so many last scores; null: of all
    # Also score the base without any adapter, as round 0 on the split of `during` and once more on the test split.
    base: bool = False


@dataclass(frozen=True)
class ExportConfig:
    """Whose personal model is written at the end; scores are of all clients in any case."""

    # seen: those of which an answer had arrived by the round that is exported; of a method that merges other runs, in
    # one of these
    clients: (
        Literal["all", "seen", "none"] | Annotated[tuple[str, ...], NonEmpty("names in brackets such as [anna,bert]")]
    ) = "all"


@dataclass(frozen=True)
class ReportConfig:
    """What report.html shows."""

    # test examples per client with the base's answer and this model's, of the first 50 clients; none under privacy.clip
    samples: NonNegativeInt = 5


@dataclass(frozen=True)
class CheckpointConfig:
    """What of a run stays on disk."""

    every: PositiveInt = 1  # rounds
    keep: PositiveInt = 2  # newest checkpoints kept; the best round is kept too
    keep_rounds: tuple[int, ...] = ()  # rounds kept for ever
    # GiB of RAM for what is kept of single clients; the rest lies in the run folder
    memory_limit: NonNegativeFloat = 4.0


@dataclass(frozen=True)
class TrackConfig:
    """Experiment trackers, through Accelerate."""

    with_: tuple[str, ...] = ()  # tensorboard, wandb
    project: str = "llm_fed"  # the name under which trackers file the run


@dataclass(frozen=True)
class SeedsConfig:
    """Seeds of their own for parts of a run; null: `seed`."""

    # who the clients are and what they hold: a task's draws, task.partition, clients drawn at random, label noise, the
    # server's examples
    federation: int | None = None
    # the start, batches, dropout, who is asked in which round, delays, noise of differential privacy
    training: int | None = None
    # which of a client's examples become its test and validation split, where the data does not say it; where it is
    # given, also which ones eval.limit keeps (null: the first)
    evaluation: int | None = None


@dataclass(frozen=True)
class Config:
    """A whole run. `llm-fed run CONFIG.yaml key=value` resolves to one of these and saves it with the run."""

    seed: int = 0  # of everything that is drawn, unless `seeds` says otherwise
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    rounds: Annotated[PositiveInt, AtMost(1_000_000)] = 50  # of asking, training and one server step
    # share of the clients asked each round, of those that are not at work
    participation: Annotated[float, Above(0), AtMost(1)] = 1.0
    # how many clients are trained in one fused pass; 1: one after another
    clients_per_pass: Literal["auto"] | PositiveInt = "auto"
    # Uploads whose norm is over so many times the median of those that arrive in the round are refused; null: only
    # those with NaN or infinite values.
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
