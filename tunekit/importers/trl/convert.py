"""A config or a command line of TRL as a config of tunekit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys, read_mapping
from tunekit.importers.launch_command import parse_options
from tunekit.importers.peft_arguments import AdapterKeys, convert_adapter, convert_quantization, report_unneeded_adapter
from tunekit.importers.training_arguments import Defaults, convert_arguments
from tunekit.importers.trl import losses
from tunekit.importers.trl.data import convert_rows
from tunekit.importers.trl.policy import convert_policy, round_batch

TASKS = {  # recipe and learning rate by the name of a script or a trainer
    "sft": ("sft", 2e-5),
    "dpo": ("preference", 1e-6),
    "kto": ("preference", 1e-6),
    "orpo": ("preference", 1e-6),
    "cpo": ("preference", 1e-6),
    "bco": ("preference", 5e-7),
    "reward": ("reward", 1e-4),
    "prm": ("reward", 1e-5),
    "grpo": ("grpo", 1e-6),
    "rloo": ("grpo", 1e-6),
    "gkd": ("distill", 2e-5),
    "distillation": ("distill", 1e-6),
}
LOSSES: dict[str, Callable[[ForeignKeys, Draft], None]] = {
    "dpo": losses.convert_dpo,
    "kto": losses.convert_kto,
    "orpo": losses.convert_orpo,
    "cpo": losses.convert_cpo,
    "bco": losses.convert_bco,
    "reward": losses.convert_reward,
    "prm": losses.convert_prm,
    "gkd": losses.convert_gkd,
    "distillation": losses.convert_distillation,
}
TASK_BY_KEY = {  # keys that only one trainer has, and then those that the others of a kind do not have
    "num_generations": "grpo", "reward_funcs": "grpo", "lmbda": "gkd", "seq_kd": "gkd",
    "teacher_model_name_or_path": "distillation", "desirable_weight": "kto", "undesirable_weight": "kto",
    "center_rewards_coefficient": "reward", "step_separator": "prm", "simpo_gamma": "cpo", "cpo_alpha": "cpo",
    "precompute_ref_log_probs": "dpo", "f_divergence_type": "dpo", "rpo_alpha": "dpo", "ld_alpha": "dpo",
    "assistant_only_loss": "sft", "completion_only_loss": "sft", "packing": "sft", "dataset_text_field": "sft",
}  # fmt: skip
ADAPTER = AdapterKeys(default_rank=16, default_alpha=32.0, default_dropout=0.05)


def import_trl(
    values: dict[str, Any], task: str | None = None, num_devices: int | None = None
) -> tuple[Draft, ForeignKeys]:
    """Convert keys of TRL's argument classes. `task` is the name of the script, such as dpo."""
    keys = ForeignKeys(values)
    name = task or guess_task(values)
    if name not in TASKS:
        raise UserError(f"trl {name}: this trainer is not available. Available: {', '.join(TASKS)}.")
    recipe, rate = TASKS[name]
    draft = Draft(recipe)
    if task is None:
        by_key = next((key for key in values if TASK_BY_KEY.get(key) == name), None)
        note = f"the trainer is not named: {name}" + (f", by the key {by_key}" if by_key else "")
        draft.differs("config", "", f"{note}; tune import -- trl {name} --config FILE names it")
    convert_model(keys, draft)
    convert_rows(keys, draft, name)
    if name in ("grpo", "rloo"):
        convert_policy(keys, draft, name)
    elif name in LOSSES:
        LOSSES[name](keys, draft)
    defaults = Defaults(learning_rate=rate, gradient_checkpointing=True, logging_steps=10)
    convert_arguments(keys, draft, defaults, num_devices or 1)
    round_batch(draft)
    if name == "sft":
        convert_sft(keys, draft)
    if draft.get("output_dir") is None:
        draft.set("output_dir", str(keys.take("output_dir", default=f"runs/trl-{name}")))
    return draft, keys


def guess_task(values: dict[str, Any]) -> str:
    """Trainer of a config that no command names."""
    if str(values.get("loss_type")) in ("sigmoid", "ipo", "hinge", "robust", "apo_zero", "['sigmoid']"):
        return "dpo"
    return next((task for key, task in TASK_BY_KEY.items() if key in values), "dpo" if "beta" in values else "sft")


def convert_model(keys: ForeignKeys, draft: Draft) -> None:
    """Model, adapter, quantization and dtypes."""
    name, revision = keys.take("model_name_or_path", "model"), keys.take("model_revision")
    if name is None:
        raise UserError("missing model_name_or_path. Set it to a directory or a name on the Hub.")
    draft.set("model", f"{name}@{revision}" if revision not in (None, "main") else str(name))
    dtype = str(keys.take("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
    is_adapted = keys.flag("use_peft")
    if is_adapted:
        convert_adapter(keys, draft, ADAPTER)
    else:
        report_unneeded_adapter(keys, draft, ADAPTER)
    convert_quantization(keys, draft)
    if dtype in ("bfloat16", "bf16") and not is_adapted:
        draft.set("precision.master_dtype", "bf16", "The model is loaded in bf16 there, and its weights stay in it")
    elif dtype in ("bfloat16", "float16", "bf16", "fp16") and is_adapted and draft.get("quantization") is None:
        draft.set("precision.frozen_dtype", "bf16" if dtype.startswith("b") else "fp16")
    if (options := keys.take("model_init_kwargs")) is not None:
        draft.drop("model_init_kwargs", options, "keys of config.json are set with config_overrides")
    for key in ("lora_task_type", "attn_implementation", "trust_remote_code"):
        if key in keys and keys.peek(key) in (False, None, "CAUSAL_LM", "SEQ_CLS"):
            keys.take(key)


def convert_sft(keys: ForeignKeys, draft: Draft) -> None:
    if (loss := keys.take("loss_type", default="nll")) not in ("nll", "chunked_nll"):
        draft.drop("loss_type", loss, "cross-entropy is used; write another loss as a class and pass --import FILE.py")
    if smoothing := keys.number("label_smoothing_factor"):
        draft.set("loss.label_smoothing", float(smoothing))
    if (coefficient := keys.number("router_aux_loss_coef")) is not None:
        draft.set("loss.router_aux_loss_coef", float(coefficient))
    if (token := keys.take("eos_token")) is not None and draft.get("data.kind") in (None, "text", "completion"):
        for section in ("data", "eval_data"):
            if draft.get(section) is not None:
                draft.set(f"{section}.eos_token", str(token))


def read_arguments(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of the arguments of a script, which override those of `--config FILE`, and options of the launcher."""
    options = {name.removeprefix("--"): value for name, value in parse_options(words).items()}
    file = options.pop("config", None)
    values: dict[str, Any] = {}
    if file is not None:
        if not Path(str(file)).is_file():
            raise UserError(f"--config: {file}: no such file.")
        values = read_mapping(Path(str(file)))
    for name, value in options.items():
        base = name.removeprefix("no_")
        if base != name and value is True:
            name, value = base, False
        values[name] = value
    launcher = {name: values.pop(name) for name in LAUNCHER_OPTIONS if name in values}
    return values, launcher


LAUNCHER_OPTIONS = ("num_processes", "num_machines", "accelerate_config", "machine_rank", "main_process_ip", "gpu_ids",
                    "main_process_port", "multi_gpu", "mixed_precision", "use_deepspeed", "use_fsdp")  # fmt: skip
