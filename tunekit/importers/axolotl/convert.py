"""A config of axolotl as a config of tunekit."""

from typing import Any

from tunekit.errors import UserError
from tunekit.importers.axolotl.data import AxolotlContext, convert_dataset, read_template
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.held_out import hold_out, to_fraction
from tunekit.importers.join_datasets import join_datasets, read_shared_keys
from tunekit.importers.peft_arguments import AdapterKeys, convert_adapter, convert_quantization, report_unneeded_adapter
from tunekit.importers.training_arguments import Defaults, convert_arguments
from tunekit.importers.trl.losses import convert_cpo
from tunekit.importers.trl.policy import convert_policy, round_batch

ADAPTER = AdapterKeys(default_alpha=16.0, dora="peft_use_dora", rslora="peft_use_rslora")
DEFAULTS = Defaults(
    learning_rate=2e-4,
    lr_scheduler="cosine",
    epochs=1,
    batch_size=1,
    logging_steps=1,
    eval_strategy="epoch",
    pushes_named_repo=True,
)
RL_RECIPES: dict[str, str] = {
    **dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo"), "preference"),
    **dict.fromkeys(("grpo", "gdpo"), "grpo"),
}
PLUGINS = {
    "liger": "not needed: kernels are selected for the device",
    "cut_cross_entropy": "not needed: head and loss are computed in chunks",
    "kernels": "not needed: kernels are selected for the device",
    "expert_parallel": "not needed: parallel.ep shares experts between devices",
}


def import_axolotl(values: Tree, num_devices: int | None = None) -> tuple[Draft, ForeignKeys]:
    """Convert the keys of a config."""
    keys = ForeignKeys(values)
    rl = read_method(keys)
    recipe = {"reward": "reward", "process_reward": "reward"}.get(rl or "", RL_RECIPES.get(rl or "", "sft"))
    draft = Draft(recipe)
    convert_model(keys, draft)
    convert_rows(keys, draft, rl)
    convert_loss(keys, draft, rl)
    convert_tokens(keys, draft)
    convert_intervals(keys, draft)
    if "batch_size" in keys:
        size = int(keys.number("batch_size", default=1))
        keys.values.setdefault("gradient_accumulation_steps", max(1, size // int(keys.peek("micro_batch_size") or 1)))
    if not any(name in keys for name in ("warmup_steps", "warmup_ratio")):
        keys.values["warmup_ratio"] = 0.03
        draft.comments["lr_scheduler.warmup_steps"] = "axolotl's default: 3% of the steps, at most 100"
    lists_strategy = any(name in keys for name in ("save_steps", "saves_per_epoch", "save_strategy"))
    if draft.get("save_every") is None and not lists_strategy:
        draft.set("save_every", 500 if draft.get("data.streaming") else "epoch")
    convert_arguments(keys, draft, DEFAULTS, num_devices or 1)
    round_batch(draft)
    draft.set("output_dir", str(keys.take("output_dir", default="./model-out")))
    convert_plugins(keys, draft)
    return draft, keys


def read_method(keys: ForeignKeys) -> str | None:
    """Preference or reward method; None for supervised fine-tuning."""
    if keys.peek("processor_type") not in (None, "") and keys.peek("skip_prepare_dataset"):
        raise UserError("processor_type: trains on images or audio, and models read text only here.")
    if keys.flag("process_reward_model"):
        return "process_reward"
    if keys.flag("reward_model"):
        return "reward"
    rl = keys.take("rl")
    name = None if rl in (None, False, "") else str(rl).removesuffix("_norm")
    if name is not None and name not in RL_RECIPES:
        raise UserError(f"rl: {name}: this method is not available. Available: {', '.join(RL_RECIPES)}.")
    return name


def convert_model(keys: ForeignKeys, draft: Draft) -> None:
    """Model, tokenizer, adapter and quantization."""
    name, revision = keys.take("base_model"), keys.take("revision_of_model")
    if name is None:
        raise UserError("missing base_model. Set it to a directory or a name on the Hub.")
    draft.set("model", f"{name}@{revision}" if revision else str(name))
    for key in ("base_model_config", "tokenizer_config"):
        if (other := keys.take(key)) not in (None, name):
            draft.set("tokenizer", str(other)) if key == "tokenizer_config" else draft.drop(
                key, other, "the config.json of the model is used; config_overrides changes its keys"
            )
    if (overrides := keys.take("overrides_of_model_config")) is not None:
        draft.set("config_overrides", overrides)
    convert_weights(keys, draft)


def convert_weights(keys: ForeignKeys, draft: Draft) -> None:
    """Adapter and quantization."""
    adapter = keys.take("adapter")
    if adapter == "qlora":
        keys.values["load_in_4bit"] = True
    if adapter in ("lora", "qlora", "dora"):
        convert_adapter(keys, draft, ADAPTER)
        if adapter == "dora":
            draft.set("adapter.kind", "dora")
        if (path := keys.take("lora_model_dir")) is not None:
            draft.set("adapter.adapter_path", str(path))
    else:
        report_unneeded_adapter(keys, draft, ADAPTER)
        draft.report_unneeded_keys(
            keys, "has no effect without an adapter", "load_in_4bit", "load_in_8bit", "lora_model_dir"
        )
        if adapter not in (None, ""):
            draft.drop("adapter", adapter, "adapters are lora and dora; all weights are trained instead")
    is_mixed = any(keys.peek(name) for name in ("deepspeed", "fsdp", "fsdp_config", "fp16", "float16"))
    is_bf16 = keys.peek("bf16") is not False or keys.peek("bfloat16") is True  # the default is auto
    if draft.get("adapter") is None and is_bf16 and not is_mixed:
        comment = "axolotl loads the model in bf16, and trains these weights; with DeepSpeed and FSDP, it keeps fp32"
        draft.set("precision.master_dtype", "bf16", comment)
    convert_quantization(keys, draft)
    if draft.get("quantization") == "nf4":
        draft.set("quantization", {"kind": "nf4", "double_quant": True})


def convert_rows(keys: ForeignKeys, draft: Draft, rl: str | None) -> None:
    """`data` and `eval_data`."""
    template = read_template(keys, draft)
    context = AxolotlContext(draft, rl, template, keys.flag("train_on_inputs"))
    stream, rows = keys.take("pretraining_dataset"), keys.take("datasets")
    is_stream = stream is not None
    entries = stream if is_stream else rows
    entries = entries if isinstance(entries, list) else [entries] if entries is not None else []
    if not entries:
        raise UserError("missing datasets. Set a list of datasets with path and type.")
    if rl in ("grpo", "gdpo"):
        converted = [convert_prompts(entry, f"datasets[{i}]", draft) for i, entry in enumerate(entries)]
    else:
        prefix = "pretraining_dataset" if is_stream else "datasets"
        entries = [set_type(entry, "completion") if is_stream else entry for entry in entries]
        converted = [convert_dataset(entry, f"{prefix}[{i}]", context) for i, entry in enumerate(entries)]
    shared = read_shared(keys, draft, rl, is_stream)
    draft.set("data", join_rows("data", converted, shared, draft))
    held_out, tests = keys.number("val_set_size", default=0), keys.take("test_datasets")
    if tests:
        parts = [convert_dataset(entry, f"test_datasets[{i}]", context) for i, entry in enumerate(tests)]
        draft.set("eval_data", join_rows("eval_data", parts, {**shared, "shuffle": None, "streaming": None}, draft))
    elif is_stream and held_out:
        draft.drop("val_set_size", held_out, "streamed rows cannot be split; set eval_data")
    else:
        hold_out(draft, "val_set_size", held_out)


def set_type(entry: Any, kind: str) -> Any:
    """A dataset for pretraining: texts."""
    entry = entry if isinstance(entry, dict) else {"path": entry}
    return {**entry, "type": kind}


def convert_prompts(entry: Any, path: str, draft: Draft) -> Tree:
    """Prompts of GRPO: the type names a Python function, which is replaced by the columns of the rows."""
    keys = ForeignKeys(entry if isinstance(entry, dict) else {"path": entry}, path)
    if (kind := keys.take("type")) is not None:
        draft.drop(keys.dotted("type"), kind, "a Python function: write it as a transform, and pass --import FILE.py")
    return convert_dataset({**keys.values, "type": "chat_template"}, path, AxolotlContext(draft, None, None, False)) | {
        "kind": "prompt"
    }


def read_shared(keys: ForeignKeys, draft: Draft, rl: str | None, is_stream: bool) -> Tree:
    """Length, packing and order of all datasets."""
    length = int(keys.number("sequence_len", "max_packed_sequence_len", default=512))
    packs = keys.flag("sample_packing", "pretrain_multipack_attn") or is_stream
    if (value := keys.take("eval_sample_packing")) not in (None, packs):
        draft.differs("eval_sample_packing", value, "rows of evaluation are packed as those of training")
    streams = keys.flag("streaming") or is_stream
    in_order = keys.take("shuffle_merged_datasets") is False or keys.flag("curriculum_sampling")
    shared = read_shared_keys(keys, length, packs, streams, not in_order)
    excess = keys.take("excess_length_strategy", default="drop")
    if excess == "raise":
        draft.differs("excess_length_strategy", excess, "longer rows are dropped, and counted")
    if not is_stream and rl not in ("grpo", "gdpo"):
        shared["excess_length_strategy"] = "truncate" if excess == "truncate" else "drop"
    return shared


def join_rows(key: str, rows: list[Tree], shared: Tree, draft: Draft) -> Tree:
    """One dataset, or a mixture of several. Texts are split instead of dropped, and prompts have no kind."""
    parts = []
    for row in rows:
        part = {name: value for name, value in row.items() if (name, value) != ("kind", "prompt")}
        parts.append(part | ({"excess_length_strategy": None} if row.get("kind") == "text" else {}))
    return join_datasets(key, parts, shared, draft)


def convert_loss(keys: ForeignKeys, draft: Draft, rl: str | None) -> None:
    """Loss of preference, reward and policy methods."""
    beta = keys.number("rl_beta", "dpo_beta")
    if rl in ("grpo", "gdpo"):
        section = keys.section("trl")
        if (server := keys.take("vllm")) is not None:
            draft.report_unneeded(
                "vllm", server, "not needed: the trainer generates, or a server that runs already (engine)"
            )
        section.values.setdefault("beta", 0.0 if beta is None else beta)
        convert_policy(section, draft, "grpo")
        return
    if rl == "reward":
        draft.set("loss", "bradley_terry")
        if (coefficient := keys.number("center_rewards_coefficient")) is not None:
            draft.set("loss.center_rewards_coefficient", float(coefficient))
    elif rl == "process_reward":
        draft.set("loss", "process_reward")
    elif rl is not None:
        convert_preference_loss(keys, draft, rl, beta)
    names = ("dpo_label_smoothing", "dpo_loss_type", "dpo_loss_weights", "orpo_alpha", "simpo_gamma", "cpo_alpha",
             "kto_desirable_weight", "kto_undesirable_weight", "num_labels", "precompute_ref_log_probs", "rpo_alpha",
             "vllm", "center_rewards_coefficient")  # fmt: skip
    draft.report_unneeded_keys(keys, "has no effect with this method", *names)
    if beta is not None and rl is None:
        draft.report_unneeded("rl_beta", beta, "has no effect without rl")


def convert_preference_loss(keys: ForeignKeys, draft: Draft, rl: str, beta: Any) -> None:
    if rl == "simpo":  # CPOTrainer of TRL, with its defaults
        keys.values |= {"loss_type": "simpo"} | ({} if beta is None else {"beta": beta})
        convert_cpo(keys, draft)
        return
    names = keys.texts("dpo_loss_type") if rl == "dpo" else []
    weights = keys.numbers("dpo_loss_weights") if names else []
    kind = {"dpo": "sigmoid", "ipo": "ipo", "kto": "kto", "orpo": "orpo"}[rl]
    strength = keys.number("orpo_alpha", default=beta) if rl == "orpo" else beta
    loss: Tree = {"kind": kind, "beta": float(0.1 if strength is None else strength)}
    for name, key in (("kto_desirable_weight", "desirable_weight"), ("kto_undesirable_weight", "undesirable_weight")):
        if rl == "kto" and (value := keys.number(name)) is not None:
            loss[key] = float(value)
    if rl == "dpo" and (smoothing := keys.number("dpo_label_smoothing")):
        loss["label_smoothing"] = float(smoothing)
    losses: list[Tree] = [{**loss, "kind": name} if name != "sft" else {"kind": name} for name in names] or [loss]
    for part, weight in zip(losses, weights, strict=False):
        part["weight"] = weight
    if rl == "dpo" and (extra := keys.number("rpo_alpha")):
        losses.append({"kind": "sft", "weight": float(extra)})
    draft.set("loss", losses[0] if len(losses) == 1 else losses)
    if keys.flag("precompute_ref_log_probs"):
        draft.set("reference", "precomputed")


def convert_tokens(keys: ForeignKeys, draft: Draft) -> None:
    """`special_tokens` and `tokens`."""
    special = keys.section("special_tokens")
    eos = special.take("eos_token")
    kind = draft.get("data.kind")
    for section in ("data", "eval_data") if eos is not None and kind in ("text", "completion") else ():
        if draft.get(section) is not None:
            draft.set(f"{section}.eos_token", str(eos))
    if eos is not None and kind not in ("text", "completion"):
        draft.report_unneeded(
            "special_tokens.eos_token", eos, "not needed: the chat template ends turns with its own token"
        )
    draft.report_unneeded_keys(
        special, "not needed: the files of the checkpoint define it", "pad_token", "bos_token", "unk_token"
    )
    if added := special.texts("additional_special_tokens"):
        draft.set("new_special_tokens", added)
    if isinstance(keys.peek("tokens"), dict):
        draft.report_unneeded("tokens", "", "not needed: the files of the checkpoint define it")
        keys.take("tokens")
    if added := keys.texts("tokens"):
        draft.set("new_tokens", added)
    if keys.section("added_tokens_overrides").values:
        draft.drop("added_tokens_overrides", "", "unused tokens cannot be renamed; add tokens with new_special_tokens")
    if (ends := keys.take("eot_tokens")) is not None:
        draft.report_unneeded(
            "eot_tokens", ends, "not needed: turns end with the token of the chat template, which is a target"
        )


def convert_intervals(keys: ForeignKeys, draft: Draft) -> None:
    """Evaluations and states per epoch."""
    epochs = float(keys.peek("num_epochs") or 1)
    if (evals := keys.number("evals_per_epoch")) is not None:
        if draft.get("eval_data") is not None and evals:
            draft.set("eval_every", to_fraction(evals, epochs), f"{evals} per epoch")
        else:
            draft.report_unneeded("evals_per_epoch", evals, "has no effect without rows for evaluation")
    saves = keys.number("saves_per_epoch")
    if saves and draft.get("data.streaming"):
        draft.differs("saves_per_epoch", saves, "streamed rows have no epochs: a state every 500 steps")
        draft.set("save_every", 500)
    elif saves:
        draft.set("save_every", to_fraction(saves, epochs), f"{saves} per epoch")


def convert_plugins(keys: ForeignKeys, draft: Draft) -> None:
    for plugin in keys.texts("plugins"):
        known = next((note for name, note in PLUGINS.items() if f".{name}." in plugin), None)
        if known:
            draft.report_unneeded("plugins", plugin, known)
        else:
            draft.drop("plugins", plugin, "this plugin has no counterpart")
