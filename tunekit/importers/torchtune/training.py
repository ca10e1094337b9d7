"""Optimizer, schedule, memory, parallelism and logging of a torchtune config."""

from typing import Any

from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.torchtune.source import COMPONENT

OPTIMIZERS = {  # by the last name of the class
    "AdamW": "adamw", "Adam": "adamw", "PagedAdamW": "adamw", "PagedAdam": "adamw", "PagedAdamW32bit": "adamw",
    "AdamW8bit": "adamw8bit", "Adam8bit": "adamw8bit", "PagedAdamW8bit": "adamw8bit", "PagedAdam8bit": "adamw8bit",
    "SGD": "sgd", "Muon": "muon", "AdamW4bit": "adamw8bit", "AdamWFp8": "adamw8bit", "_AdamW": "adamw",
}  # fmt: skip
KEPT_IN_MEMORY = "paged states stay on the device here; memory.optimizer_in_bwd and adamw8bit save memory"
NOT_NEEDED = {
    "log_level": "not needed: one process prints",
    "log_peak_memory_stats": "not needed: is always logged",
    "custom_sharded_layers": "not needed: FSDP2 shards each layer, the embedding and the head",
    "tensor_parallel_plan": "not needed: each layer has a plan",
    "memory_efficient_fsdp_wrap": "not needed: FSDP2 shards each layer",
    "low_cpu_ram": "not needed: weights are read one tensor at a time",
    "use_distributed_state_dict": "not needed: training states can be read on any number of devices",
    "use_flex": "not needed: kernels are selected for the device",
    "enable_kv_cache": "not needed: answers are always generated with a cache",
    "activation_offloading_use_streams": "not needed: copies run on a stream of their own",
    "collate_fn": "not needed: rows are padded, or packed with data.packing",
    "save_adapter_weights_only": "not needed: the result is the adapter; training states are separate",
    "context_parallel_rotate_method": "not needed: one method",
    "resume_from_checkpoint": "not needed: the same command resumes",
}  # fmt: skip


def convert_training(keys: ForeignKeys, draft: Draft, num_devices: int) -> None:
    """All keys that the recipes for training share. A batch size that is set already is kept."""
    if draft.get("global_batch_size") is None:
        convert_batches(keys, draft, num_devices)
    convert_length(keys, draft)
    if num_devices > 1:
        draft.launch += ["--nproc-per-node", str(num_devices)]
    convert_optimizer(keys, draft)
    convert_schedule(keys, draft)
    convert_memory(keys, draft)
    convert_parallel(keys, draft)
    convert_logging(keys, draft)
    convert_profiler(keys.section("profiler"), draft)
    convert_unneeded(keys, draft)


def convert_unneeded(keys: ForeignKeys, draft: Draft) -> None:
    if keys.peek("resume_from_checkpoint") is True:
        draft.drop(
            "resume_from_checkpoint", keys.take("resume_from_checkpoint"), "states of torchtune cannot be resumed"
        )
    for name, note in NOT_NEEDED.items():
        if name in keys and (value := keys.take(name)) is not None:
            draft.report_unneeded(name, value, note)


def convert_batches(keys: ForeignKeys, draft: Draft, num_devices: int) -> None:
    """Rows of a step over all devices."""
    size = int(keys.number("batch_size", default=1))
    steps = int(keys.number("gradient_accumulation_steps", default=1))
    shared = int(keys.peek("tensor_parallel_dim") or 1) * int(keys.peek("context_parallel_dim") or 1)
    groups = max(1, num_devices // shared)
    comment = f"{size} x {steps} accumulation steps" + (f" x {groups} devices" if groups > 1 else "")
    draft.set("global_batch_size", size * steps * groups, comment)
    draft.set("micro_batch_size", size)


def convert_length(keys: ForeignKeys, draft: Draft) -> None:
    """Epochs, steps and the seed."""
    epochs, per_epoch = keys.number("epochs", default=1), keys.number("max_steps_per_epoch")
    draft.set("epochs", int(epochs))
    if per_epoch is not None:
        draft.set("max_steps", int(epochs * per_epoch), "At most this many steps: max_steps_per_epoch x epochs")
    if (seed := keys.number("seed")) is not None:
        draft.set("seed", int(seed))


def convert_optimizer(keys: ForeignKeys, draft: Draft) -> None:
    optimizer = keys.section("optimizer")
    name = str(optimizer.take(COMPONENT, default="torch.optim.AdamW"))
    last = name.rpartition(".")[2]
    kind = OPTIMIZERS.get(last)
    if kind is None:
        draft.drop("optimizer._component_", name, "this optimizer is not available: adamw")
    elif last != "AdamW" and kind != "sgd":
        note = KEPT_IN_MEMORY if last.startswith("Paged") else f"{kind} is used"
        draft.differs("optimizer._component_", name, note)
    draft.set("optimizer", kind or "adamw")
    draft.set("optimizer.lr", optimizer.number("lr", default=1e-3))
    if kind != "sgd":
        betas = optimizer.take("betas", default=[0.9, 0.999])
        draft.set("optimizer.betas", [float(beta) for beta in betas], "" if kind else "defaults of torch.optim.AdamW")
        if (eps := optimizer.number("eps")) is not None:
            draft.set("optimizer.eps", eps)
    elif momentum := optimizer.number("momentum"):
        draft.set("optimizer.momentum", momentum)
    default_decay = 0.01 if "AdamW" in last or kind is None else 0.1 if last == "Muon" else 0.0
    if decay := optimizer.number("weight_decay", default=default_decay):
        draft.set("optimizer.weight_decay", decay, "Not applied to norms and biases, unlike there")
    for argument in (
        "fused",
        "foreach",
        "capturable",
        "differentiable",
        "is_paged",
        "optim_bits",
        "percentile_clipping",
    ):
        if argument in optimizer:
            draft.report_unneeded(
                f"optimizer.{argument}", optimizer.take(argument), "not needed: fused where torch supports it"
            )


def convert_schedule(keys: ForeignKeys, draft: Draft) -> None:
    """Schedule; without one, the learning rate is constant."""
    if keys.peek("lr_scheduler") is None:
        keys.take("lr_scheduler")
        draft.set("lr_scheduler", "constant")
        return
    scheduler = keys.section("lr_scheduler")
    name = str(scheduler.take(COMPONENT, default="get_cosine_schedule_with_warmup")).rpartition(".")[2]
    kinds = {"get_cosine_schedule_with_warmup": "cosine", "get_linear_schedule_with_warmup": "linear",
             "LinearLR": "linear", "CosineAnnealingLR": "cosine", "ConstantLR": "constant"}  # fmt: skip
    if name not in kinds:
        draft.drop("lr_scheduler._component_", name, "this schedule is not available: cosine")
    draft.set("lr_scheduler", kinds.get(name, "cosine"))
    if warmup := scheduler.number("num_warmup_steps", default=0):
        draft.set("lr_scheduler.warmup_steps", warmup)
    if (cycles := scheduler.number("num_cycles")) not in (None, 0.5):
        draft.drop("lr_scheduler.num_cycles", cycles, "the learning rate decays once, over half a cosine period")


def convert_memory(keys: ForeignKeys, draft: Draft) -> None:
    mode, option = keys.take("ac_mode"), keys.take("ac_option")
    if keys.flag("enable_activation_checkpointing") or mode in ("full", "selective"):
        draft.set("memory.activation_checkpointing", "selective" if option == "op" else "full")
        if mode == "selective" and option != "op":
            draft.differs("ac_option", option, "all layers are recomputed, not every N-th one")
    if keys.flag("enable_activation_offloading"):
        draft.set("memory.activation_offloading", True)
    if keys.flag("optimizer_in_bwd"):
        draft.set("memory.optimizer_in_bwd", True)
    clip = float(keys.number("clip_grad_norm", default=0))
    is_off = clip in (0, float("inf"))
    draft.set("max_grad_norm", 0 if is_off else clip, "No clipping" if is_off else "")
    compiled = keys.take("compile", default=False)
    if compiled is True or (isinstance(compiled, dict) and compiled.get("model", True)):
        draft.set("compile", True)
    convert_precision(keys, draft, masters=True)
    if keys.flag("enable_fp8_training"):
        draft.drop("enable_fp8_training", True, "products in float8 are not available for trained weights")
    if (recipe := keys.take("fp8_recipe_name")) is not None:
        draft.drop("fp8_recipe_name", recipe, "products in float8 are not available for trained weights")
    if keys.flag("cudnn_deterministic_mode"):
        draft.set("deterministic", True)


def convert_precision(keys: ForeignKeys, draft: Draft, masters: bool) -> None:
    """dtypes and device. torchtune keeps trained weights and their optimizer states in `dtype`."""
    dtype = str(keys.take("dtype", default="bf16"))
    if dtype in ("bf16", "fp16", "fp32"):
        draft.set("precision.compute_dtype", dtype)
        if masters and dtype == "bf16":
            comment = "As in torchtune. fp32, the default, needs more memory and keeps small updates"
            draft.set("precision.master_dtype", "bf16", comment)
    else:
        draft.drop("dtype", dtype, "must be bf16, fp16 or fp32")
    device = keys.take("device", default="cuda")
    if device in ("cpu", "mps", "xpu"):
        draft.set("device", device)
    elif device != "cuda":
        draft.drop("device", device, "must be cpu, cuda, xpu or mps")


def convert_parallel(keys: ForeignKeys, draft: Draft) -> None:
    fsdp = keys.section("fsdp")
    if keys.flag("fsdp_cpu_offload") or fsdp.flag("cpu_offload"):
        draft.set("parallel.cpu_offload", True)
    for name, key in (("tensor_parallel_dim", "tp"), ("context_parallel_dim", "cp")):
        if (degree := keys.number(name, default=1)) > 1:
            draft.set(f"parallel.{key}", int(degree))
    if (shards := keys.number("data_parallel_shard_dim", default=-1)) > 0:
        draft.set("parallel.dp_shard", int(shards))
    if (copies := keys.number("data_parallel_replicate_dim", default=1)) > 1:
        draft.set("parallel.dp_replicate", int(copies))
    if keys.take("fsdp_reshard_after_forward") is False:
        draft.set("parallel.reshard_after_forward", False)


def convert_logging(keys: ForeignKeys, draft: Draft) -> None:
    draft.set("output_dir", keys.take("output_dir", default="runs/imported"))
    draft.set("log_every", int(keys.number("log_every_n_steps", default=1)))
    if every := keys.number("save_every_n_steps"):
        draft.set("save_every", int(every))
    elif draft.get("save_every") is None:
        draft.set("save_every", "epoch")
    if keys.flag("enable_async_checkpointing"):
        draft.set("async_save", True)
    logger = keys.section("metric_logger")
    name = str(logger.take(COMPONENT, default="")).rpartition(".")[2]
    if (tracker := convert_tracker(name, logger)) is not None:
        draft.set("report_to", [tracker])
    elif name in ("", "DiskLogger", "StdoutLogger"):
        for key in [*logger.values]:
            draft.report_unneeded(
                logger.dotted(key), logger.take(key), "not needed: metrics.jsonl is in the run directory"
            )
    else:
        draft.drop("metric_logger._component_", name, "trackers are tensorboard, wandb, mlflow, trackio and comet")


def convert_tracker(name: str, logger: ForeignKeys) -> dict[str, Any] | None:
    """Tracker of a logger; None for one that is not needed or not available."""
    fields = {
        "WandBLogger": ("wandb", ("project", "entity", "group", "name")),
        "TensorBoardLogger": ("tensorboard", ("log_dir",)),
        "CometLogger": ("comet", ("project", "workspace", "experiment_name:name")),
        "MLFlowLogger": ("mlflow", ("experiment_name", "tracking_uri", "run_name")),
    }
    if name not in fields:
        return None
    kind, names = fields[name]
    pairs = ((field.partition(":")[2] or field, logger.take(field.partition(":")[0])) for field in names)
    if kind == "wandb":
        logger.take("log_dir")
    return {"kind": kind, **{key: value for key, value in pairs if value is not None}}


def convert_profiler(profiler: ForeignKeys, draft: Draft) -> None:
    """Profiler of some steps. Its options have no effect while it is off."""
    is_on = profiler.flag("enabled")
    profiler.take(COMPONENT)
    wait, warmup = profiler.number("wait_steps", default=5), profiler.number("warmup_steps", default=3)
    active = profiler.number("active_steps", default=2)
    if not is_on:
        for name in [*profiler.values]:
            draft.report_unneeded(profiler.dotted(name), profiler.take(name), "the profiler is off")
        return
    draft.set("profiler", {"skip_first": int(wait + warmup), "active": int(active)})
    if profiler.flag("profile_memory"):
        draft.set("profiler.profile_memory", True)
    for name in ("cpu", "cuda", "xpu", "output_dir"):
        if name in profiler:
            note = "not needed: host and device are traced, to profile/ in the run directory"
            draft.report_unneeded(profiler.dotted(name), profiler.take(name), note)
    for name in ("with_stack", "record_shapes", "with_flops"):
        if profiler.flag(name):
            draft.drop(profiler.dotted(name), True, "traces have no stacks, shapes or FLOPs")
    if (cycles := profiler.number("num_cycles", default=1)) != 1:
        draft.drop(profiler.dotted("num_cycles"), cycles, "one cycle of steps is profiled")
