"""Sections of DeepSpeed, FSDP and accelerate, and the degrees of parallelism."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys, read_mapping

SHARDED = "not needed: weights, gradients and optimizer states are sharded with FSDP2 (tune run --nproc-per-node N)"
DEGREES = {
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "sequence_parallel_degree": "cp",
    "expert_parallel_size": "ep",
}


def convert_distribution(keys: ForeignKeys, draft: Draft) -> None:
    """Sharding, offloading and parallelism. Called before the batch size is computed."""
    for name, key in DEGREES.items():
        if (degree := keys.number(name, default=1)) > 1:
            draft.set(f"parallel.{key}", int(degree))
    for name, key in (("dp_shard_size", "dp_shard"), ("dp_replicate_size", "dp_replicate")):
        if (size := keys.number(name)) is not None and size > 0:
            draft.set(f"parallel.{key}", int(size))
    convert_fsdp(keys, draft)
    convert_deepspeed(keys, draft)
    convert_degrees(keys, draft)
    if keys.take("accelerator_config") is not None:
        draft.report_unneeded("accelerator_config", "", SHARDED)


def convert_degrees(keys: ForeignKeys, draft: Draft) -> None:
    """`parallelism_config` of accelerate."""
    section = keys.section("parallelism_config")
    for name, key in (("tp_size", "tp"), ("cp_size", "cp"), ("sp_size", "cp"), ("ep_size", "ep")):
        if (degree := section.number(name, default=1)) > 1:
            draft.set(f"parallel.{key}", int(degree))
    for name, key in (("dp_shard_size", "dp_shard"), ("dp_replicate_size", "dp_replicate")):
        if (size := section.number(name)) is not None and size > 0:
            draft.set(f"parallel.{key}", int(size))
    if (value := keys.take("parallelism_config")) is not None:
        draft.drop("parallelism_config", value, "must be a mapping with tp_size, cp_size, dp_shard_size or others")


def convert_fsdp(keys: ForeignKeys, draft: Draft) -> None:
    mode = keys.take("fsdp")
    words = " ".join(mode if isinstance(mode, list) else [str(mode or "")])
    config = keys.section("fsdp_config")
    if isinstance(path := keys.peek("fsdp_config"), str):
        keys.take("fsdp_config")
        config = ForeignKeys(read_mapping(Path(path)), "fsdp_config") if Path(path).is_file() else config
    options = {name.removeprefix("fsdp_"): value for name, value in config.values.items()}
    config.values.clear()
    if keys.take("fsdp_version") or options or words not in ("", "False"):
        draft.report_unneeded("fsdp", words, SHARDED)
    if "offload" in words or options.get("offload_params") is True:
        draft.set("parallel.cpu_offload", True)
    convert_sharding(f"{words} {options.get('sharding_strategy')} {options.get('reshard_after_forward')}", draft)
    if options.get("activation_checkpointing") is True:
        draft.set("memory.activation_checkpointing", "full")
    known = {"offload_params", "reshard_after_forward", "activation_checkpointing", "cpu_ram_efficient_loading",
             "sync_module_states", "use_orig_params", "state_dict_type", "final_state_dict_type", "auto_wrap_policy",
             "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params", "version",
             "backward_prefetch", "forward_prefetch", "sharding_strategy", "mixed_precision_policy",
             "limit_all_gathers", "cpu_offload_pin_memory", "xla", "backward_prefetch_policy"}  # fmt: skip
    for name in options.keys() - known:
        draft.drop(f"fsdp_config.{name}", options[name], "no option of sharding here")


def convert_sharding(strategies: str, draft: Draft) -> None:
    """Sharding strategies by name or number, of any of the keys that have one."""
    names = strategies.lower().split()
    if any(name in names for name in ("shard_grad_op", "hybrid_shard_zero2", "2", "5", "false")):
        draft.set("parallel.reshard_after_forward", False)
    if any(name in names for name in ("hybrid_shard", "hybrid_shard_zero2", "4", "5")):
        draft.differs(
            "fsdp", "hybrid_shard", "weights are sharded over all nodes: set parallel.dp_replicate to their number"
        )
    if any(name in names for name in ("no_shard", "3")):
        draft.set("parallel.dp_replicate", None, "Each device has all weights")
        draft.set("parallel.dp_shard", 1)


def convert_deepspeed(keys: ForeignKeys, draft: Draft) -> None:
    """A section or a file of DeepSpeed. Offloading is what matters here: all stages of ZeRO become FSDP2."""
    value = keys.take("deepspeed")
    if value is None or value is False:
        return
    draft.report_unneeded("deepspeed", value if isinstance(value, str) else "", SHARDED)
    config: Any = value
    if isinstance(value, str):
        config = read_file(value)
        if config is None and "offload" in value.lower():
            draft.set("parallel.cpu_offload", True, f"By the name {Path(value).name}, which is not on this machine")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if isinstance(zero, Mapping):
        devices = [zero.get(name, {}) for name in ("offload_optimizer", "offload_param")]
        if any(isinstance(part, Mapping) and part.get("device") in ("cpu", "nvme") for part in devices):
            draft.set("parallel.cpu_offload", True)


def read_file(path: str) -> dict[str, Any] | None:
    """Mapping of a file; None if it does not exist or cannot be read."""
    try:
        return read_mapping(Path(path)) if Path(path).is_file() else None
    except UserError:
        return None
