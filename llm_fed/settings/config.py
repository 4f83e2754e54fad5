"""The configuration of a run: frozen dataclasses whose fields carry their defaults and ranges (`llm_fed.settings`), and
the check of what relates two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Literal

from llm_fed.basics.errors import UserError, did_you_mean, one_line
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
from llm_fed.settings.objective import ObjectiveConfig, check_objective

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Encoding = Literal["float16", "bfloat16"]  # of the numbers of a state when it is sent
TEMPLATES = ("alpaca", "alpaca-short", "plain", "chat")  # of prompts, by name, see `tasks.common`
LIKELIHOOD = "token_likelihood"  # the metric of texts without prompts
PREFERENCE = "preference_accuracy"  # the metric of pairs of answers
NUMBER = "number"  # instead of the names of labels, where a number is predicted
# Image models whose weights are drawn anew: a folder of such a name in the working directory is not meant.
IMAGE_MODELS = (
    "cnn", "cnn-1", "cnn-2", "cnn-3", "cnn-4", "cnn-5",
    "resnet-9", "resnet-18", "resnet-34", "resnet-50", "resnet-101", "resnet-152",
)  # fmt: skip


@dataclass(frozen=True)
class BaseConfig:
    """The pretrained model; it is frozen when adapters are trained."""

    name: str = "meta-llama/Llama-3.2-3B-Instruct"  # a Hub id or a folder; for images also cnn, cnn-1 ... resnet-9 ...
    # image models that are assigned to the clients in turn; `name` is then the small shared model, if there is one
    clients: tuple[str, ...] | None = None
    # number format of the base's weights and of autocast; `auto` is bfloat16 on a GPU that has it, else float32
    dtype: Dtype = "auto"
    quantization: Literal["nf4", "int8"] | None = None  # quantise the base with bitsandbytes
    # `auto` spreads a language model over all GPUs of one process
    device_map: Literal["auto"] | None = None
    activation_checkpointing: bool = False  # recompute activations: less memory, ~1/3 more time
    revision: str | None = None  # on the Hub
    # language, images, sequence-classification, or a class of your own as package.module:Class; null: what the task's
    # examples need
    kind: str | None = None


MODULES = "at least one module name"


@dataclass(frozen=True)
class AdapterConfig:
    """The LoRA adapter that clients train (Hu et al. 2022); `adapter: null` trains a whole image model."""

    # the rank r; for some methods also a list in the clients' order, or {client: rank, ...}, see docs/bases.md
    rank: Annotated[PositiveInt, AtMost(2**16)] | tuple[int, ...] | dict[str, int] = 8
    alpha: PositiveFloat = 16  # an adapter's output is scaled by alpha / rank
    rslora: bool = False  # scale by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023)
    dora: bool = False  # also train the length of each output's weights (DoRA, Liu et al. 2024); see docs/bases.md
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.05  # of an adapter's inputs
    # last parts of module names, one regular expression, or all-linear; with a head for labels the default is what the
    # architecture calls query and value
    target_modules: tuple[str, ...] | str = ("q_proj", "v_proj")
    # ends of the names of fused experts that are adapted too, see docs/bases.md
    target_parameters: tuple[str, ...] = ()
    start: str | None = None  # adapters to start from: a finished run, one PEFT folder, or a folder of one per client


@dataclass(frozen=True)
class ColumnsConfig:
    """Column names of a user's own files; `null` lets the task look for the usual names, which docs/data.md lists."""

    prompt: str | None = None  # null: the usual names (docs/data.md); `ticket.question` is a nested one
    input: str | None = None  # context that follows the prompt
    answer: str | None = None  # the answer, or label
    options: str | None = None  # a list of texts, for option scoring
    client: str | None = None  # the client's name; files are then joined by split, whatever they are called
    messages: str | None = None  # conversations, instead of prompt and answer
    text: str | None = None  # whole texts, instead of prompt and answer
    chosen: str | None = None  # the preferred one of two answers
    rejected: str | None = None  # the other one
    label: str | None = None  # whether an answer is desirable, for objective.name=kto
    extra: tuple[str, ...] = ()  # columns of numbers that a method's own loss is given, see CONTRIBUTING.md


@dataclass(frozen=True)
class PartitionConfig:
    """How examples are divided among clients, if not as in the data."""

    # `natural` (folders, tasks, or columns.client), `split` (k clients per natural one), `iid`, `dirichlet`,
    # `pathological` (some labels each) or `cluster` (a part of the labels for each cluster of clients)
    kind: str = "natural"
    clients: PositiveInt | None = None  # number of clients; for `split` per natural client
    alpha: PositiveFloat = 0.5  # concentration of `dirichlet` and `pathological`
    classes: PositiveInt | None = None  # number of labels per client, for `pathological`
    # of clients in each cluster, for `cluster`
    sizes: Annotated[tuple[PositiveInt, ...], NonEmpty("a number for each cluster")] | None = None
    label: str | None = None  # column with the label, if text is divided by label
    # pool train and test first, and make this share of each client's examples its test split
    test: Annotated[float, Above(0), Below(1)] | None = None


@dataclass(frozen=True)
class ServerConfig:
    """The server's own examples; by default it has none."""

    # number, drawn from the task's test split, or from the training split of `name`
    examples: NonNegativeInt | None = 0
    each: bool = False  # `examples` counts per natural client
    name: str | None = None  # another task as the source; `examples` may then be null for all
    path: str | None = None  # local files of that task, as in task.path
    test: bool = False  # keep the rest of the test split at the server, to test the one model of all


@dataclass(frozen=True)
class TaskConfig:
    """The data set, and how its examples become text or image inputs."""

    name: str = "flan"  # name of the data set, see docs/tasks.md
    path: str | None = None  # a folder of files in any form of docs/data.md, one file, or hf://owner/name
    groups: tuple[str, ...] | None = None  # keep only these natural clients, in this order
    # keep only this many clients, the first after `groups` and `partition`
    clients: Annotated[PositiveInt | None, "for all"] = None
    sample_clients: bool = False  # draw these clients at random instead of taking the first
    max_length: Annotated[int, AtLeast(2), "in tokens"] = 512  # largest length of prompt and response together
    # `skip` leaves longer examples out; `cut-end` truncates the response, `cut-start` the prompt, in evaluation too
    too_long: Literal["skip", "cut-end", "cut-start"] = "skip"
    # `alpaca`, `alpaca-short`, `plain`, `chat` (the tokenizer's own), or a text that contains {prompt}
    template: str = "alpaca-short"
    loss_on: Literal["response", "all"] = "response"  # tokens that count in the loss
    # share of training examples held out for validation, if the data has no such split
    validation: Annotated[float, AtLeast(0), Below(1)] = 0.1
    image_size: PositiveInt | None = None  # height and width in pixels; null: as in the data, if all are of one size
    # names of all classes in order, if the data of one machine may lack some; null: those in the data
    labels: Annotated[tuple[str, ...] | None, NonEmpty("names")] = None
    # share of training labels that are replaced by a random class, for images
    noise: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    # rows that cannot be used: `stop` refuses the data, `skip` leaves up to a tenth out and lists them
    bad_rows: Literal["stop", "skip"] = "stop"
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class LocalConfig:
    """The training of one client in one round."""

    steps: PositiveInt | None = 20  # optimizer steps; null: see `epochs`
    epochs: PositiveInt | None = None  # passes over the training examples, instead of steps
    batch_size: PositiveInt = 4  # examples per optimizer step and client
    lr: PositiveFloat = 5e-5  # learning rate in the first round
    lr_end: NonNegativeFloat = 5e-6  # learning rate in the last round
    schedule: Literal["linear", "cosine"] = "linear"  # shape of the learning rate from `lr` to `lr_end` over the rounds
    # of the learning rate within each round, from the round's own to zero
    decay: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # first steps of a round in which it rises to the round's own
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"  # of the clients
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.0  # of sgd
    weight_decay: NonNegativeFloat = 0.0  # decoupled for adamw, added to the gradient for adam and sgd
    clip: PositiveFloat | None = None  # largest norm of a client's gradient; larger ones are scaled down
    proximal: NonNegativeFloat = 0.0  # lambda of lambda * ||theta - theta_start||^2 in the loss
    freeze: str | None = None  # regular expression of parameters that no client trains, e.g. '^classifier' for a head
    # of images: `crop` shifts them at random by up to an eighth of the sides, `crop-flip` also mirrors
    augment: Literal["crop", "crop-flip"] | None = None

    def steps_on(self, examples: int) -> int:
        """The optimizer steps of one round on so many examples."""
        size = min(self.batch_size, examples)
        return self.steps if self.steps is not None else (self.epochs or 1) * -(-examples // size)


@dataclass(frozen=True)
class DelayConfig:
    """Simulated delays of updates, in rounds."""

    sigma: NonNegativeFloat = 0.0  # an update is floor(|N(0, sigma)|) rounds late; its client is not asked meanwhile
    drop_out: Annotated[float, AtLeast(0), Below(1)] = 0.0  # probability that an update never arrives


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy, off without `clip`, and sums that nobody sees through. See docs/privacy.md."""

    # what is protected: all that a client has, or each training example, by noise in every optimizer step (DP-SGD)
    unit: Literal["client", "example"] = "client"
    # clipping norm C: the largest Euclidean norm of an upload, or of an example's gradient
    clip: PositiveFloat | None = None
    noise: NonNegativeFloat = 0.0  # multiplier: Gaussian noise of standard deviation noise * clip on every number
    # for unit `client`: noise on the sum at the `server` (clients are then sampled independently), or at the `client`
    where: Literal["server", "client"] = "server"
    delta: Annotated[float, Above(0), Below(1)] = 1e-5  # delta for which epsilon is reported
    secure: bool = False  # the server learns the sum of a round's updates and no single one; `clip` may be null
    bound: PositiveFloat = 2.0  # with `secure`: a longer update is cut to this Euclidean norm

    @property
    def draws(self) -> bool:
        """Whether anything is drawn from the run's secret."""
        return self.clip is not None or self.secure

    @property
    def central(self) -> bool:
        """Whether the server adds noise to the sum of the uploads."""
        return self.clip is not None and self.unit == "client" and self.where == "server"

    @property
    def by_example(self) -> bool:
        """Whether clients add noise in every optimizer step, instead of noise on uploads."""
        return self.clip is not None and self.unit == "example"


@dataclass(frozen=True)
class ServerStepConfig:
    """How the server averages updates: see docs/robust.md."""

    aggregation: Literal[
        "mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping"
    ] = "mean"
    # largest expected share of malicious uploads, and largest weight of one client
    liars: Annotated[float, Above(0), Below(0.5)] = 0.2


@dataclass(frozen=True)
class NetworkConfig:
    """Clients on other machines (`llm-fed flower`)."""

    # the clients' names, or only their number. A client is expected at the node that is registered under its name, or
    # at another: client@node
    clients: Annotated[tuple[str, ...], NonEmpty("names")] | PositiveInt = 1
    # time after which a round or an evaluation ends without the clients that have not answered
    deadline: Annotated[PositiveFloat, "in seconds"] = 600.0
    # a round ends after this many answers; null: when all clients that were asked have answered
    enough: Annotated[PositiveInt | None, "for all"] = None
    # time after which an answer is given up, and its client may be asked again
    patience: Annotated[PositiveFloat, "in seconds"] = 3600.0
    # seconds after which a run begins without clients that have not come; those with a name join when they come
    wait: Annotated[PositiveFloat | None, "to wait for all"] = 3600.0
    # limit on a client's number of examples in means, as a multiple of the median
    weight_bound: Annotated[float | None, AtLeast(1), "for any number"] = 10.0


@dataclass(frozen=True)
class EvalConfig:
    """When and how clients are evaluated."""

    every: NonNegativeInt = 10  # rounds between validation scores; the last round is always scored; 0: only the last
    # `rouge1`, `rouge2`, `rougeL`, `exact_match`, `option_accuracy`, `commonsense_accuracy`, `squad_f1`, `squad_em`,
    # `token_likelihood` (100 / perplexity), `preference_accuracy` (docs/preferences.md); of labels `accuracy`, `f1` (of
    # two labels, the second), `f1_macro` or `matthews`; of numbers `pearson` or `spearman`; or your own as
    # package.module:function;
    metric: str | None = None  # null: the task's own
    limit: PositiveInt | None = None  # at most this many examples per client and split
    batch_size: PositiveInt | None = None  # most prompts of a batch, of any clients; null: 32, on a GPU 256
    max_new_tokens: PositiveInt = 128  # largest length of an answer in tokens
    select: Literal["best", "last"] = "best"  # round that is tested: the last, or the best by its score during training
    during: Literal["validation", "test"] = "validation"  # the split that is scored during training
    of_last: PositiveInt | None = None  # number of last scores among which `best` chooses; null: all
    # also score the base without any adapter (language models): `true` also as round 0; `auto` on the test split alone,
    # and not over a network
    base: Literal["auto"] | bool = True
    ability: bool = False  # also score models on a fixed English text: what has the base forgotten? See docs/report.md
    # also score each personal model on the other clients' test examples: `auto` of up to eight clients, on at most 50
    # examples each; `true` all on all. Warnings rest on it, see docs/warnings.md
    cross: Literal["auto"] | bool = "auto"


@dataclass(frozen=True)
class StopConfig:
    """When a run ends before its last round; see docs/steering.md."""

    patience: PositiveInt | None = None  # scored rounds without a better validation score after which a run ends
    min_delta: NonNegativeFloat = 0.0  # an improvement is more than this above the best score so far


@dataclass(frozen=True)
class ExportConfig:
    """Which personal models are exported at the end; all clients are scored in any case."""

    # `seen` are the clients of which an update had arrived by the exported round
    clients: (
        Literal["all", "seen", "none"] | Annotated[tuple[str, ...], NonEmpty("names in brackets such as [anna,bert]")]
    ) = "all"


@dataclass(frozen=True)
class ReportConfig:
    """Contents of report.html."""

    samples: NonNegativeInt = 5  # sample predictions per client, for the first 50 clients; none with privacy.clip


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run keeps on disk."""

    every: PositiveInt = 1  # rounds between checkpoints
    keep: PositiveInt = 2  # number of newest checkpoints that are kept; the best round is kept, too
    keep_rounds: tuple[PositiveInt, ...] = ()  # rounds that are never deleted


@dataclass(frozen=True)
class TrackConfig:
    """Experiment trackers, through Accelerate."""

    with_: tuple[str, ...] = ()  # `tensorboard`, `wandb`, `mlflow`


@dataclass(frozen=True)
class EngineConfig:
    """How passes are computed; see docs/performance_gpu.md."""

    # capture passes as CUDA graphs, lay texts end to end without padding, and fuse kernels, where base and task allow
    # it: `auto` on a GPU, with families that one has run so. Without a GPU `on` gains nothing
    fast: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True)
class SeedsConfig:
    """Separate seeds for parts of a run; null: `seed`."""

    federation: NonNegativeInt | None = None  # the clients and their data, and the server's examples
    # initialisation, batches, dropout, client sampling, delays; with privacy.clip see docs/privacy.md, The secret
    training: NonNegativeInt | None = None
    # test and validation splits, if the data has none; if set, also which examples eval.limit keeps, else the first
    evaluation: NonNegativeInt | None = None


@dataclass(frozen=True)
class Config:
    """A whole run. `llm-fed run CONFIG.yaml key=value` resolves to one of these and saves it with the run."""

    seed: NonNegativeInt = 0  # random seed of the run; see `seeds` for its parts
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    rounds: Annotated[PositiveInt, AtMost(1_000_000)] = 50  # communication rounds
    # share of the clients sampled in each round, among those that are not still training
    participation: Annotated[float, Above(0), AtMost(1)] = 1.0
    # number of clients that train in one fused pass; 1: one client after another
    clients_per_pass: Literal["auto"] | PositiveInt = "auto"
    # uploads with a part whose norm exceeds this multiple of the round's median are refused; null: none are
    norm_bound: Annotated[float, Above(1)] | None = 10.0
    device: Device = "auto"  # `auto`: a GPU if there is one
    base: BaseConfig = field(default_factory=BaseConfig)
    adapter: AdapterConfig | None = field(default_factory=AdapterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "fedmerge"})  # name and settings of the method
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    # number format of messages in both directions, whose receivers compute from the rounded numbers; null: unchanged
    transport: Encoding | None = None
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    server: ServerStepConfig = field(default_factory=ServerStepConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def lr(self, round: int) -> float:
        """The learning rate of a round: from `local.lr` to `local.lr_end` in the last, as `local.schedule` says."""
        local, share = self.local, (round - 1) / max(1, self.rounds - 1)
        if local.schedule == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return local.lr + (local.lr_end - local.lr) * share

    @property
    def start(self) -> str | None:
        """The run or folder of adapters that it starts from; None: from fresh draws."""
        return self.adapter.start if self.adapter else None

    @property
    def ranks_differ(self) -> bool:
        """Whether clients have ranks of their own, be they equal."""
        return self.adapter is not None and not isinstance(self.adapter.rank, int)

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
    """UserError for the first value that is not what its field says, or does not go with another."""
    check_fields(config, "")
    check_together(config)


def check_together(config: Config) -> None:
    """UserError for the first value that does not go with another; each by itself is what its field says."""

    def require(good: bool, key: str, what: str) -> None:
        if not good:
            raise UserError(f"{key} is {attrgetter(key)(config)!r}; it must be {what}")

    require(config.task.clients is not None or not config.task.sample_clients, "task.clients",
            "a number with task.sample_clients")  # fmt: skip
    test, server, adapter = config.task.partition.test, config.task.server, config.adapter
    require(adapter is None or bool(adapter.target_modules or adapter.target_parameters), "adapter.target_modules",
            MODULES)  # fmt: skip
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
    require((config.local.steps is None) != (config.local.epochs is None), "local.steps",
            "a number while local.epochs is null, or null while local.epochs is a number")  # fmt: skip
    require(not config.local.momentum or config.local.optimizer == "sgd", "local.momentum",
            "0 unless local.optimizer is sgd")  # fmt: skip
    require(config.privacy.clip is not None or not config.privacy.noise, "privacy.clip", "a number with privacy.noise")
    require(config.privacy.clip is not None or config.privacy.unit == "client", "privacy.clip",
            "a number with privacy.unit=example")  # fmt: skip
    if config.stop.patience is not None:
        require(config.eval.every > 0, "eval.every", "at least 1 with stop.patience, which counts scored rounds")
        require(config.eval.during == "validation", "eval.during",
                "validation with stop.patience: a run that ends by its test score has seen it")  # fmt: skip
    if config.objective != ObjectiveConfig():
        check_objective(config.objective, config.task.loss_on)
    network = config.network
    require(network.deadline <= network.patience, "network.patience",
            "at least network.deadline and finite, in seconds")  # fmt: skip
    require("name" in config.method, "method", "a mapping with the method's name")
