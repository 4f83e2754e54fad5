"""What is typed out of habit: the names that TRL, transformers, PEFT, axolotl and Flower have for settings, and what to
type here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# By setting its names elsewhere; a setting with a value stands for one that is switched on there.
_NAMES = {
    "rounds": "num_rounds n_rounds num_server_rounds comm_round comm_rounds global_rounds communication_rounds",
    "participation": "fraction_fit fraction_train client_fraction sample_fraction participation_rate",
    "seed": "random_seed random_state data_seed",
    "base.name": "base_model model model_name model_name_or_path model_id pretrained_model_name_or_path base",
    "base.dtype": "torch_dtype dtype precision",
    "base.dtype=bfloat16": "bf16",
    "base.dtype=float16": "fp16 half",
    "base.quantization=nf4": "load_in_4bit qlora",
    "base.quantization=int8": "load_in_8bit",
    "base.activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing",
    "adapter.rank": "r lora_r lora_rank peft_lora_r rank",
    "adapter.alpha": "lora_alpha peft_lora_alpha",
    "adapter.dropout": "lora_dropout peft_lora_dropout",
    "adapter.target_modules": "lora_target_modules lora_target peft_target_modules",
    "adapter.target_parameters": "lora_target_parameters",
    "adapter.rslora": "use_rslora peft_use_rslora",
    "adapter.dora": "use_dora peft_use_dora",
    "task.path": "dataset dataset_name dataset_path data data_path data_dir train_file datasets",
    "task.clients": "num_clients n_clients num_supernodes num_partitions client_num_in_total",
    "task.max_length": "max_length max_seq_length max_seq_len seq_length sequence_len cutoff_len model_max_length",
    "task.template": "chat_template prompt_template prompt_style template",
    "task.loss_on=all": "train_on_inputs",
    "task.loss_on=response": "completion_only_loss assistant_only_loss train_on_responses_only",
    "task.validation": "val_set_size validation_split eval_split test_size",
    "method": "strategy algorithm aggregator aggregation_method strategy_name",
    "local.lr": "learning_rate lr client_lr local_lr base_lr",
    "local.epochs": "num_train_epochs epochs num_epochs n_epochs local_epochs client_epochs",
    "local.steps": "max_steps local_steps local_iterations steps_per_round num_steps steps",
    "local.batch_size": (
        "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size train_batch_size batch_size bs"
    ),
    "local.optimizer": "optim optimizer_name",
    "local.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "local.weight_decay": "wd",
    "local.clip": "max_grad_norm gradient_clipping clip_grad_norm gradient_clip_val",
    "local.proximal": "proximal_mu mu prox_mu",
    "objective.name": "rlhf_type loss_type objective",
    "objective.beta": "dpo_beta rl_beta",
    "eval.every": "eval_steps evals_per_epoch eval_frequency evaluate_every",
    "eval.metric": "metric_for_best_model compute_metrics metric metrics",
    "eval.batch_size": "per_device_eval_batch_size eval_batch_size",
    "eval.max_new_tokens": "max_new_tokens generation_max_length max_tokens",
    "checkpoint.every": "save_steps saves_per_epoch checkpoint_every",
    "checkpoint.keep": "save_total_limit",
    "track.with": "report_to logger",
    "privacy.noise": "noise_multiplier dp_noise",
    "server.aggregation": "aggregation",
}
_OURS = {name: setting for setting, names in _NAMES.items() for name in names.split()}
_BESIDE = {"local.epochs": " local.steps=null"}  # the one counts instead of the other
# Commands of other programs.
COMMANDS = {
    **dict.fromkeys(("train", "fit", "start", "launch", "finetune", "fine-tune", "sft", "simulate"), "run"),
    **dict.fromkeys(("evaluate", "score", "test"), "eval"),
    **dict.fromkeys(("predict", "generate", "infer", "inference"), "chat"),
    **dict.fromkeys(("benchmark", "bench", "sweep"), "compare"),
    "upload": "push",
    **dict.fromkeys(("new", "setup", "create"), "init"),
}


def instead(key: str, value: object, known: Iterable[str]) -> str | None:
    """What to type instead of a setting that there is not: by what it is called elsewhere, or where one alone of
    the `known` settings (dotted keys) has its last name. None: nothing is known."""
    last = key.rpartition(".")[2].lstrip("-").replace("-", "_").casefold()
    ends = [each for each in known if each.rpartition(".")[2] == last]
    setting = _OURS.get(last) or (ends[0] if len(ends) == 1 else None)
    if setting is None or setting == key:
        return None
    given = "..." if isinstance(value, Mapping | list | tuple) or value is None or value == "" else value
    return setting if "=" in setting else f"{setting}={given}{_BESIDE.get(setting, '')}"
