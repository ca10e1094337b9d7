"""Keys of TrainingArguments of transformers, which TRL, axolotl and LLaMA-Factory share."""

from dataclasses import dataclass
from typing import Any

from tunekit.importers.distribution import convert_distribution
from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys, parse_mapping, parse_word

ADAMW = """adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused
 adamw_anyprecision optimi_adamw adamw_torch_4bit adopt_adamw flash_adamw adamc stable_adamw schedule_free_adamw
 ademamix"""
ADAMW_8BIT = """adamw_8bit adamw_bnb_8bit ao_adamw_8bit ao_adamw_4bit ao_adamw_fp8 adamw_torch_8bit ademamix_8bit
 q_galore_adamw8bit adamw8bit"""
EXACT_ADAMW = (
    "adamw",
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "optimi_adamw",
    "flash_adamw",
)
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "one_cycle": "cosine",
    "rex": "cosine",
}
INEXACT_SCHEDULES = {"one_cycle", "rex"}
TRACKER_KEYS = {  # trackers, and the keys that select them
    "tensorboard": ("use_tensorboard",),
    "wandb": ("use_wandb", "wandb_project"),
    "mlflow": ("use_mlflow", "mlflow_experiment_name"),
    "trackio": ("use_trackio", "trackio_project_name"),
    "comet": ("use_comet", "comet_project_name"),
}
TRACKER_ALIASES = {"comet_ml": "comet"}
TRACKER_OPTIONS = ("use_wandb", "use_tensorboard", "use_comet", "use_trackio", "use_mlflow", "wandb_mode",
                   "wandb_project", "wandb_entity", "wandb_name", "wandb_run_id", "logging_dir")  # fmt: skip
UNTRACKED = "trackers are tensorboard, wandb, mlflow, trackio and comet"
EVERY_STEP = 10**9  # more steps than any run has


@dataclass(frozen=True)
class Defaults:
    """Values of keys that a config leaves out."""

    learning_rate: float = 5e-5
    lr_scheduler: str = "linear"
    epochs: float = 3
    batch_size: int = 8
    accumulation_steps: int = 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    logging_steps: float = 500
    save_steps: float = 500
    seed: int = 42
    gradient_checkpointing: bool = False
    eval_strategy: str = "no"
    pushes_named_repo: bool = False  # hub_model_id implies push_to_hub, to a private repository


def convert_arguments(keys: ForeignKeys, draft: Draft, defaults: Defaults, num_devices: int) -> None:
    """Convert all shared keys."""
    convert_distribution(keys, draft)
    convert_batches(keys, draft, defaults, num_devices)
    convert_optimizer(keys, draft, defaults)
    convert_schedule(keys, draft, defaults)
    convert_precision(keys, draft)
    convert_memory(keys, draft, defaults)
    convert_intervals(keys, draft, defaults)
    convert_trackers(keys, draft)
    convert_hub(keys, draft, defaults)
    draft.set("seed", int(keys.number("seed", default=defaults.seed)))
    if keys.flag("use_cpu", "no_cuda"):
        draft.set("device", "cpu")
    if keys.flag("full_determinism"):
        draft.set("deterministic", True)
    if (alpha := keys.number("neftune_noise_alpha", "noisy_embedding_alpha")) is not None:
        draft.set("neftune_noise_alpha", float(alpha))


def convert_batches(keys: ForeignKeys, draft: Draft, defaults: Defaults, num_devices: int) -> None:
    """Rows of a step over all devices that read different rows."""
    size = int(keys.number("per_device_train_batch_size", "micro_batch_size", default=defaults.batch_size))
    steps = int(keys.number("gradient_accumulation_steps", default=defaults.accumulation_steps))
    shared = max(1, int(draft.get("parallel.tp", 1)) * int(draft.get("parallel.cp", 1)))
    groups = max(1, num_devices // shared)
    comment = f"{size} x {steps} accumulation steps" + (f" x {groups} devices" if groups > 1 else "")
    comment += "" if num_devices > 1 else "; multiply it by the number of devices of the original, if it had several"
    draft.set("global_batch_size", size * steps * groups, comment)
    draft.set("micro_batch_size", size)
    if num_devices > 1:
        draft.launch += ["--nproc-per-node", str(num_devices)]
    for name in ("per_device_eval_batch_size", "eval_batch_size"):
        if (value := keys.take(name)) is not None:
            draft.report_unneeded(name, value, "not needed: micro_batch_size, also of evaluation")
    epochs, max_steps = keys.number("num_train_epochs", "num_epochs", default=defaults.epochs), keys.number("max_steps")
    if epochs != int(epochs):
        draft.differs("num_train_epochs", epochs, "rounded up; set max_steps for a part of an epoch")
    draft.set("epochs", max(1, -int(-epochs // 1)))
    if max_steps is not None and max_steps > 0:
        draft.set("max_steps", int(max_steps))


def convert_optimizer(keys: ForeignKeys, draft: Draft, defaults: Defaults) -> None:
    name = str(keys.take("optim", "optimizer", default="adamw_torch")).lower()
    base = name.removeprefix("paged_").removesuffix("_32bit")
    kind = "adamw8bit" if base in ADAMW_8BIT.split() else "adamw" if base in ADAMW.split() else None
    kind = {"sgd": "sgd", "muon": "muon", "flash_sgd": "sgd", "flash_sgdw": "sgd"}.get(base, kind)
    if kind is None:
        draft.drop("optim", name, "this optimizer is not available: adamw")
    elif name.startswith("paged_"):
        draft.differs("optim", name, "paged states stay on the device here; adamw8bit needs less memory")
    elif base not in (*EXACT_ADAMW, "sgd", "muon", "adamw_8bit", "adamw_bnb_8bit"):
        draft.differs("optim", name, f"{kind} is used")
    draft.set("optimizer", kind or "adamw")
    draft.set("optimizer.lr", float(keys.number("learning_rate", default=defaults.learning_rate)))
    beta1, beta2 = keys.number("adam_beta1", default=0.9), keys.number("adam_beta2", default=0.999)
    eps = keys.number("adam_epsilon", "adam_eps")
    if kind != "sgd":
        draft.set("optimizer.betas", [float(beta1), float(beta2)])
        if eps is not None and float(eps) != 1e-8:
            draft.set("optimizer.eps", float(eps))
    if decay := float(keys.number("weight_decay", default=defaults.weight_decay)):
        draft.set("optimizer.weight_decay", decay)
    convert_optimizer_arguments(keys, draft)
    draft.set("max_grad_norm", float(keys.number("max_grad_norm", default=defaults.max_grad_norm)))


def convert_optimizer_arguments(keys: ForeignKeys, draft: Draft) -> None:
    """`optim_args`, as a mapping or as `name=value,...`."""
    arguments = keys.take("optim_args")
    arguments = parse_pairs(arguments) if isinstance(arguments, str) else arguments
    for name, value in (arguments or {}).items():
        key = {"weight_decay": "weight_decay", "eps": "eps", "momentum": "momentum"}.get(name)
        if key is not None:
            draft.set(f"optimizer.{key}", float(value))
        else:
            draft.drop(f"optim_args.{name}", value, "no argument of the optimizers here")


def convert_schedule(keys: ForeignKeys, draft: Draft, defaults: Defaults) -> None:
    name = str(keys.take("lr_scheduler_type", "lr_scheduler", default=defaults.lr_scheduler)).lower()
    arguments = keys.take("lr_scheduler_kwargs")
    arguments = parse_pairs(arguments) if isinstance(arguments, str) else arguments
    kind = SCHEDULES.get(name)
    if kind is None:
        draft.drop("lr_scheduler_type", name, "this schedule is not available: cosine")
    elif name in INEXACT_SCHEDULES:
        draft.differs("lr_scheduler_type", name, "cosine is used")
    draft.set("lr_scheduler", kind or "cosine")
    steps, ratio = keys.number("warmup_steps", default=0), keys.number("warmup_ratio", default=0)
    if (steps or ratio) and name != "constant":
        draft.set("lr_scheduler.warmup_steps", int(steps) if steps >= 1 else float(steps or ratio))
    elif steps or ratio:
        draft.report_unneeded("warmup_steps", steps or ratio, "has no effect with a constant schedule")
    convert_schedule_arguments(dict(arguments or {}), keys, draft)


def convert_schedule_arguments(arguments: dict[str, Any], keys: ForeignKeys, draft: Draft) -> None:
    """Minimum of the learning rate, and the decay of warmup-stable-decay."""
    kind = draft.get("lr_scheduler.kind", draft.get("lr_scheduler"))
    ratio = keys.number("cosine_min_lr_ratio")
    for name in ("min_lr_rate", "min_lr_ratio"):
        ratio = arguments.pop(name, ratio)
    if (low := arguments.pop("min_lr", None)) is not None:
        ratio = float(low) / float(draft.get("optimizer.lr"))
    if ratio is not None and kind != "constant":
        draft.set("lr_scheduler.min_lr_ratio", float(ratio))
    total, decay = draft.get("max_steps"), arguments.pop("num_decay_steps", None)
    if kind == "wsd" and decay is not None and total:
        warmup = draft.get("lr_scheduler.warmup_steps", 0)
        draft.set("lr_scheduler.decay_ratio", round(float(decay) / (total - int(warmup)), 6))
    elif decay is not None:
        note = "set lr_scheduler.decay_ratio, a fraction of the steps"
        draft.drop("lr_scheduler_kwargs.num_decay_steps", decay, note)
    for key, value in arguments.items():
        if not (key == "num_cycles" and value == 0.5):
            draft.drop(f"lr_scheduler_kwargs.{key}", value, "no argument of the schedules here")


def parse_pairs(text: str) -> dict[str, Any]:
    """Arguments as JSON, or as `name=value,name=value`."""
    if text.strip().startswith("{"):
        return parse_mapping(text, "arguments")
    return {
        name: parse_word(value) for name, _, value in (pair.strip().partition("=") for pair in text.split(",")) if name
    }


def convert_precision(keys: ForeignKeys, draft: Draft) -> None:
    """dtype of computation. Trained weights are fp32 there too, unless the whole model is loaded in bf16."""
    values = {name: keys.take(name) for name in ("bf16", "bfloat16", "fp16", "float16")}
    bf16 = next((values[name] for name in ("bfloat16", "bf16") if values[name] not in (None, False)), values["bf16"])
    fp16 = True if values["float16"] is True else values["fp16"]
    if str(bf16).lower() in ("true", "full"):
        draft.set("precision.compute_dtype", "bf16")
    elif fp16 is True:
        draft.set("precision.compute_dtype", "fp16")
    elif bf16 is False and fp16 in (False, None):
        draft.set("precision.compute_dtype", "fp32")
    if keys.peek("tf32") is True and draft.get("precision.compute_dtype") == "fp32":
        keys.take("tf32")
        draft.set("precision.compute_dtype", "tf32")
    draft.report_unneeded_keys(keys, "has no effect with bf16 or fp16", "tf32")


def convert_memory(keys: ForeignKeys, draft: Draft, defaults: Defaults) -> None:
    checkpointing = keys.take("gradient_checkpointing", "activation_checkpointing")
    if checkpointing is None:
        checkpointing = draft.get("memory.activation_checkpointing") or defaults.gradient_checkpointing
    if checkpointing not in (False, None):
        draft.set("memory.activation_checkpointing", "full")
        if checkpointing not in (True, "true", "unsloth", "full"):
            draft.differs("gradient_checkpointing", checkpointing, "the input of each layer stays on the device")
    if keys.take("activation_offloading") not in (None, False, "legacy", "disk"):
        draft.set("memory.activation_offloading", True)
    if keys.take("torch_compile") is True:
        draft.set("compile", True)


def convert_intervals(keys: ForeignKeys, draft: Draft, defaults: Defaults) -> None:
    """Logging, saving and evaluation. Without evaluation, `eval_data` is removed."""
    every = keys.number("logging_steps", default=defaults.logging_steps)
    strategy = keys.take("logging_strategy")
    draft.set("log_every", max(1, int(every)) if every >= 1 else 1)
    if strategy == "epoch":
        draft.differs("logging_strategy", strategy, "metrics are written every log_every steps")
    saves = read_strategy(keys, "save_strategy", default="steps")
    steps = keys.number("save_steps", default=defaults.save_steps)
    if draft.get("save_every") is None:
        every_save = {"epoch": "epoch", "no": EVERY_STEP, "best": "epoch"}.get(saves, to_interval(steps))
        draft.set("save_every", every_save, "Only the last state is saved" if saves == "no" else "")
    if (limit := keys.number("save_total_limit")) is not None:
        draft.set("save_total_limit", max(1, int(limit)))
    convert_evaluation(keys, draft, to_interval(every), defaults)


def read_strategy(keys: ForeignKeys, *names: str, default: str) -> str:
    """Take no, steps, epoch or best. YAML reads `no` as false."""
    value = keys.take(*names, default=default)
    return "no" if value is False else str(value).lower()


def convert_evaluation(keys: ForeignKeys, draft: Draft, logging_steps: float, defaults: Defaults) -> None:
    strategy = read_strategy(keys, "eval_strategy", "evaluation_strategy", default=defaults.eval_strategy)
    steps = keys.number("eval_steps")
    if strategy == "no" and draft.get("eval_data") is not None and draft.get("eval_every") is None:
        draft.tree.pop("eval_data")
        draft.report_unneeded("eval_strategy", strategy, "the rows for evaluation have no effect without it")
    if draft.get("eval_data") is not None and draft.get("eval_every") is None:
        by_steps = to_interval(steps) if steps else logging_steps
        is_epoch = strategy == "epoch" and not (steps and defaults.eval_strategy == "epoch")
        draft.set("eval_every", "epoch" if is_epoch else by_steps)
    elif draft.get("eval_data") is None and steps is not None:
        draft.report_unneeded("eval_steps", steps, "not needed: there are no rows for evaluation")
    convert_best_model(keys, draft)


def convert_best_model(keys: ForeignKeys, draft: Draft) -> None:
    """Early stopping, and the weights of the best evaluation."""
    best, patience = keys.flag("load_best_model_at_end"), keys.number("early_stopping_patience")
    if draft.get("eval_data") is None and (best or patience):
        draft.drop("load_best_model_at_end" if best else "early_stopping_patience", best or patience, "needs eval_data")
    if draft.get("eval_data") is None or not (best or patience):
        note = "has no effect without load_best_model_at_end and rows for evaluation"
        draft.report_unneeded_keys(keys, note, "metric_for_best_model", "greater_is_better")
        return
    metric, greater = keys.take("metric_for_best_model"), keys.take("greater_is_better")
    if best:
        draft.set("load_best_model_at_end", True)
    if patience:
        draft.set("early_stopping_patience", int(patience))
    if metric not in (None, "loss", "eval_loss"):
        draft.drop(
            "metric_for_best_model",
            metric,
            "the loss of evaluation; set metric_for_best_model to a metric of the recipe",
        )
    elif greater is True:
        draft.drop("greater_is_better", greater, "the loss is to be small")


def to_interval(steps: Any) -> int | float:
    """Steps, or a fraction of all steps below 1."""
    return int(steps) if steps >= 1 else float(steps)


def convert_trackers(keys: ForeignKeys, draft: Draft) -> None:
    """`report_to` with the keys of each tracker."""
    names = [TRACKER_ALIASES.get(name.lower(), name.lower()) for name in keys.texts("report_to")]
    names += [name for name, options in TRACKER_KEYS.items() if any(map(keys.peek, options))]
    if keys.peek("wandb_mode") == "disabled" or keys.peek("use_wandb") is False:
        names = [name for name in names if name != "wandb"]
    run_name, trackers = keys.take("run_name"), []
    for name in dict.fromkeys(names):
        if name in TRACKER_KEYS:
            trackers.append(make_tracker(name, keys, run_name))
        elif name not in ("none", "null"):
            draft.drop("report_to", name, UNTRACKED)
    for key in TRACKER_OPTIONS:
        if (value := keys.take(key)) not in (None, False, "") and not any(item["kind"] in key for item in trackers):
            draft.report_unneeded(key, value, "has no effect without this tracker")
    if trackers:
        draft.set("report_to", trackers)
    elif run_name is not None:
        draft.report_unneeded("run_name", run_name, "names a run of a tracker, and there is none")


def make_tracker(name: str, keys: ForeignKeys, run_name: Any) -> dict[str, Any]:
    fields = {
        "wandb": {"project": ("wandb_project",), "entity": ("wandb_entity",), "name": ("wandb_name", "wandb_run_id")},
        "tensorboard": {"log_dir": ("logging_dir",)},
        "mlflow": {"experiment_name": ("mlflow_experiment_name",), "tracking_uri": ("mlflow_tracking_uri",),
                   "run_name": ("mlflow_run_name",)},
        "trackio": {"project": ("trackio_project_name", "project"), "name": ("trackio_run_name",),
                    "space_id": ("trackio_space_id",)},
        "comet": {"project": ("comet_project_name",), "workspace": ("comet_workspace",)},
    }[name]  # fmt: skip
    values = {key: keys.take(*names) for key, names in fields.items()}
    label = "run_name" if name == "mlflow" else "name"
    if name != "tensorboard" and values.get(label) is None:
        values[label] = run_name
    if name == "wandb" and keys.take("wandb_mode") == "offline":
        values["offline"] = True
    return {"kind": name, **{key: value for key, value in values.items() if value not in (None, "")}}


def convert_hub(keys: ForeignKeys, draft: Draft, defaults: Defaults) -> None:
    """`push_to_hub`. A name of a repository alone pushes nothing, except in axolotl."""
    repo = keys.take("hub_model_id", "push_to_hub_model_id")
    pushes = keys.flag("push_to_hub", default=defaults.pushes_named_repo and repo is not None)
    if repo is None and pushes:
        draft.drop("push_to_hub", True, "set push_to_hub.repo_id to OWNER/NAME")
    if repo is None or not pushes:
        names = ("hub_private_repo", "hub_revision", "hub_strategy")
        if repo is not None:
            draft.report_unneeded("hub_model_id", repo, "has no effect without push_to_hub")
        draft.report_unneeded_keys(keys, "has no effect without push_to_hub", *names)
        return
    private = keys.flag("hub_private_repo", default=defaults.pushes_named_repo)
    revision, strategy = keys.take("hub_revision"), keys.take("hub_strategy")
    draft.set("push_to_hub", {"repo_id": str(repo), "private": private})
    if revision:
        draft.set("push_to_hub.revision", revision)
    if strategy in ("every_save", "checkpoint", "all_checkpoints") and isinstance(draft.get("save_every"), int):
        draft.set("push_to_hub.push_every", draft.get("save_every"))
