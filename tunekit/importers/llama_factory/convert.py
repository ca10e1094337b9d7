"""A config of LLaMA-Factory as a config of tunekit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.held_out import hold_out
from tunekit.importers.join_datasets import join_datasets, read_shared_keys
from tunekit.importers.llama_factory.data import LlamaFactoryContext, convert_datasets
from tunekit.importers.peft_arguments import AdapterKeys, convert_adapter, report_unneeded_adapter, set_quantization
from tunekit.importers.training_arguments import Defaults, convert_arguments

STAGES = {"pt": "sft", "sft": "sft", "rm": "reward", "ppo": "ppo", "dpo": "preference", "kto": "preference"}
TEMPLATES = {  # templates whose format is that of a bundled one; the others are those of the checkpoints
    "alpaca": "alpaca", "chatml": "chatml", "gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma", "llama2": "inst",
    "llama3": "llama3", "mistral": "mistral", "phi": "phi3", "phi_small": "phi3", "zephyr": "zephyr",
}  # fmt: skip
UNNAMED_TEMPLATES = ("default", "empty", "vanilla", "fewshot")  # texts without markers
RLHF_KEYS = ("pref_loss", "pref_ftx", "dpo_label_smoothing", "simpo_gamma", "ld_alpha", "kto_chosen_weight",
             "kto_rejected_weight", "ref_model", "ref_model_adapters", "ref_model_quantization_bit", "reward_model",
             "reward_model_type", "ppo_epochs", "ppo_buffer_size", "ppo_score_norm", "ppo_target",
             "ppo_whiten_rewards")  # fmt: skip
ADAPTER = AdapterKeys("lora_rank", 8, None, 0.0, "lora_target", "all", "additional_target")
DEFAULTS = Defaults(gradient_checkpointing=True)


def import_llama_factory(
    values: Tree, num_devices: int | None = None, path: Path | None = None
) -> tuple[Draft, ForeignKeys]:
    """Convert the keys of a config. `path` is its file, next to which the datasets are looked up."""
    keys = ForeignKeys(values)
    stage = read_stage(keys)
    draft = Draft(STAGES[stage])
    convert_model(keys, draft)
    convert_rows(keys, draft, stage, path)
    convert_loss(keys, draft, stage)
    if keys.flag("disable_gradient_checkpointing"):
        keys.values["gradient_checkpointing"] = False
    if keys.flag("use_muon"):
        keys.values["optim"] = "muon"
    is_pure = keys.flag("pure_bf16")
    if is_pure:
        keys.values["bf16"] = True
        draft.set("precision.master_dtype", "bf16", "pure_bf16: trained weights are bf16 too")
    evaluates_last = bool(keys.peek("do_eval"))
    defaults = replace(DEFAULTS, eval_strategy="epoch") if evaluates_last else DEFAULTS
    if evaluates_last and not keys.peek("eval_strategy") and draft.get("eval_data") is not None:
        draft.comments["eval_every"] = "do_eval evaluates once, after training"
    convert_arguments(keys, draft, defaults, num_devices or 1)
    draft.set("output_dir", str(keys.take("output_dir", default="runs/llama-factory")))
    convert_profiler(keys, draft)
    for name in ("do_train", "do_eval"):
        if (value := keys.take(name)) is not None:
            draft.report_unneeded(name, value, "not needed: tune run trains, and evaluates eval_data")
    return draft, keys


def read_stage(keys: ForeignKeys) -> str:
    """Stage of training. Raise UserError for configs of other commands, with the command of tunekit."""
    model = keys.peek("model_name_or_path") or keys.peek("model_name")
    adapter = keys.peek("adapter_name_or_path")
    if (directory := keys.peek("export_dir")) is not None:
        command = f"tune merge {model} {adapter} {directory}" if adapter else f"tune export {model} {directory}"
        raise UserError(f"export_dir: the config of an export. Run: {command}")
    if "dataset" not in keys and "stage" not in keys and "do_train" not in keys:
        raise UserError(f"the config has no dataset. To talk to the model, run: tune chat {adapter or model}")
    if keys.peek("do_predict") and not keys.peek("do_train"):
        raise UserError(
            "do_predict: answers are generated with recipe generate, or scored with recipe evaluate (docs/evaluate.md)."
        )
    stage = str(keys.take("stage", default="sft"))
    if stage not in STAGES:
        raise UserError(f"stage: {stage}: must be one of {', '.join(STAGES)}.")
    return stage


def convert_model(keys: ForeignKeys, draft: Draft) -> None:
    """Model, adapter, frozen weights and quantization."""
    name, revision = keys.take("model_name_or_path"), keys.take("model_revision")
    if name is None:
        raise UserError("missing model_name_or_path. Set it to a directory or a name on the Hub.")
    draft.set("model", f"{name}@{revision}" if revision not in (None, "main") else str(name))
    kind = str(keys.take("finetuning_type", default="lora"))
    if kind == "lora":
        convert_lora(keys, draft)
        convert_quantization_bit(keys, draft)
    else:
        report_unneeded_adapter(keys, draft, ADAPTER)
        names = ("pissa_init", "adapter_name_or_path", "quantization_bit", "quantization_method", "double_quantization",
                 "quantization_type")  # fmt: skip
        draft.report_unneeded_keys(keys, "has no effect without an adapter", *names)
    if kind == "freeze":
        convert_frozen(keys, draft)
    elif kind not in ("lora", "full"):
        draft.drop("finetuning_type", kind, "adapters are lora and dora; all weights are trained instead")
    if keys.flag("train_from_scratch"):
        draft.set("init", "random")
    for name, key in (("add_tokens", "new_tokens"), ("add_special_tokens", "new_special_tokens")):
        if tokens := keys.texts(name):
            draft.set(key, tokens)


def convert_lora(keys: ForeignKeys, draft: Draft) -> None:
    """LoRA or DoRA, new or continued."""
    convert_adapter(keys, draft, ADAPTER)
    if keys.flag("pissa_init"):
        draft.set("adapter.init", "pissa")
    paths = keys.texts("adapter_name_or_path")
    is_new = bool(keys.peek("create_new_adapter"))
    if paths and not is_new:
        draft.set("adapter.adapter_path", paths[-1])
    if len(paths) > 1 or (paths and is_new):
        draft.drop("adapter_name_or_path", paths, "merge the earlier adapters first: tune merge BASE ADAPTER DIR")


def convert_frozen(keys: ForeignKeys, draft: Draft) -> None:
    """Training of some layers. Their numbers from the end are not known before the model is read."""
    layers = int(keys.number("freeze_trainable_layers", default=2))
    modules, extra = keys.texts("freeze_trainable_modules"), keys.texts("freeze_extra_modules")
    names = "|".join(modules) if modules not in ([], ["all"]) else ".+"
    if layers < 0:
        numbers = "|".join(str(i) for i in range(-layers))
        draft.set("adapter", {"kind": "none", "trainable_modules": [rf"layers\.({numbers})\..*({names})", *extra]})
    else:
        note = f"the last {layers} layers: set adapter.trainable_modules to a pattern with their numbers"
        draft.drop("freeze_trainable_layers", layers, note)


def convert_quantization_bit(keys: ForeignKeys, draft: Draft) -> None:
    if keys.peek("quantization_bit") is None:
        names = ("quantization_method", "quantization_type", "double_quantization", "quantization_bit")
        draft.report_unneeded_keys(keys, "has no effect without quantization_bit", *names)
        return
    bits, method = keys.number("quantization_bit"), str(keys.take("quantization_method", default="bnb")).lower()
    kind, nested = str(keys.take("quantization_type", default="nf4")), keys.flag("double_quantization", default=True)
    if "bnb" not in method and "bitsandbytes" not in method:
        draft.differs("quantization_method", method, "nf4 for 4 bits, float8 for 8 bits")
    set_quantization(draft, int(bits), kind, nested)


def convert_template(keys: ForeignKeys, draft: Draft) -> Tree:
    """Chat template of conversations, and its variables."""
    name = keys.take("template")
    thinking, preserves = keys.take("enable_thinking"), keys.take("preserve_thinking")
    base = str(name).removesuffix("_nothink") if name is not None else ""
    values: Tree = {}
    if str(name).endswith("_nothink") or thinking is False:
        values["enable_thinking"] = False
    if preserves is True:
        draft.differs(
            "preserve_thinking", preserves, "reasoning of earlier turns is written if the chat template writes it"
        )
    if base in UNNAMED_TEMPLATES:
        draft.differs("template", name, "texts without markers there; here, the chat template of the checkpoint")
    elif name is not None and base not in TEMPLATES:
        draft.report_unneeded("template", name, "not needed: the chat template of the checkpoint")
    template = {"chat_template": TEMPLATES[base]} if base in TEMPLATES else {}
    if values and template:
        draft.report_unneeded("enable_thinking", False, "not needed: the chat template writes no reasoning")
    return template | ({"chat_template_kwargs": values} if values and not template else {})


def convert_rows(keys: ForeignKeys, draft: Draft, stage: str, path: Path | None) -> None:
    """`data` and `eval_data`."""
    targets: Tree = {}
    if stage != "sft":
        draft.report_unneeded_keys(keys, "has no effect in this stage", "train_on_prompt", "mask_history")
    if keys.flag("train_on_prompt"):
        targets = {"train_on": "all"}
    if keys.flag("mask_history"):
        targets = {"train_on": "last"}
    directory = str(keys.take("dataset_dir", default="data"))
    base = path.parent if path is not None else None
    context = LlamaFactoryContext(draft, stage, directory, base, convert_template(keys, draft), targets)
    names = split_names(keys.take("dataset"))
    if not names:
        raise UserError("missing dataset. Set a name of dataset_info.json.")
    rows = convert_datasets(names, context)
    system = keys.take("default_system")
    if system is not None and all(row.get("kind") == "instruct" for row in rows):
        rows = [{**row, "system_prompt": str(system)} for row in rows]
    elif system is not None:
        draft.drop("default_system", system, "add a column system to the rows")
    shared = read_shared(keys, stage)
    weights, strategy = keys.numbers("interleave_probs"), str(keys.take("mix_strategy", default="concat"))
    draft.set("data", join_datasets("data", rows, shared, draft, weights))
    if strategy == "interleave_over":
        draft.differs("mix_strategy", strategy, "an epoch ends with the first dataset that has no rows left")
    evaluated, size = split_names(keys.take("eval_dataset")), keys.number("val_size", default=0)
    if evaluated:
        rows = convert_datasets(evaluated, context)
        draft.set("eval_data", join_datasets("eval_data", rows, {**shared, "streaming": None}, draft))
    else:
        hold_out(draft, "val_size", size)


def split_names(value: Any) -> list[Any]:
    """Names of datasets, separated by commas; or descriptions."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value if isinstance(value, list) else [] if value is None else [value]


def read_shared(keys: ForeignKeys, stage: str) -> Tree:
    """Length, packing and order of all datasets."""
    packing = keys.take("packing")
    packs = keys.flag("neat_packing") or packing is True or (stage == "pt" and packing is None)
    length, shuffle = int(keys.number("cutoff_len", default=2048)), not keys.flag("disable_shuffling")
    shared = read_shared_keys(keys, length, packs, keys.flag("streaming"), shuffle)
    if (count := keys.number("max_samples")) is not None:
        shared["max_samples"] = int(count)
    return shared


def convert_loss(keys: ForeignKeys, draft: Draft, stage: str) -> None:
    beta = float(keys.number("pref_beta", "dpo_beta", "kto_beta", default=0.1))
    if stage == "dpo":
        convert_preference(keys, draft, beta)
    elif stage == "kto":
        loss: Tree = {"kind": "kto", "beta": beta}
        for name, key in (("kto_chosen_weight", "desirable_weight"), ("kto_rejected_weight", "undesirable_weight")):
            if (weight := keys.number(name)) is not None:
                loss[key] = float(weight)
        draft.set("loss", loss)
    elif stage == "rm":
        draft.set("loss", "bradley_terry")
    elif stage == "ppo":
        convert_ppo(keys, draft)
    if stage in ("pt", "sft", "rm"):
        draft.report_unneeded_keys(keys, "has no effect in this stage", *RLHF_KEYS)


def convert_preference(keys: ForeignKeys, draft: Draft, beta: float) -> None:
    name = str(keys.take("pref_loss", "dpo_loss", default="sigmoid"))
    kinds = ("sigmoid", "hinge", "ipo", "orpo", "simpo")
    if name not in kinds:
        draft.drop("pref_loss", name, "this loss is not available: sigmoid")
    loss: Tree = {"kind": name if name in kinds else "sigmoid", "beta": beta}
    if (smoothing := keys.number("dpo_label_smoothing")) and loss["kind"] == "sigmoid":
        loss["label_smoothing"] = float(smoothing)
    gamma = keys.number("simpo_gamma", default=0.5)
    if loss["kind"] == "simpo":
        loss["simpo_gamma"] = float(gamma)
    weight = keys.number("pref_ftx", "dpo_ftx", default=0.0)
    draft.set("loss", [loss, {"kind": "sft", "weight": float(weight)}] if weight else loss)
    if (alpha := keys.number("ld_alpha")) is not None:
        draft.set("ld_alpha", float(alpha))


def convert_ppo(keys: ForeignKeys, draft: Draft) -> None:
    model, kind = keys.take("reward_model"), keys.take("reward_model_type")
    draft.set("rewards", [{"kind": "reward_model", "model": str(model or "reward-model")}])
    if model is None or kind == "api":
        draft.drop("reward_model", model, "set the directory of a reward model, or a function, as rewards")
    elif kind is not None:
        draft.report_unneeded("reward_model_type", kind, "not needed: the directory of an adapter is read, too")
    if (passes := keys.number("ppo_epochs")) is not None:
        draft.set("num_ppo_epochs", int(passes))
    if (buffer := keys.number("ppo_buffer_size", default=1)) > 1:
        draft.set("num_mini_batches", int(buffer))
    if keys.flag("ppo_whiten_rewards"):
        draft.set("loss.whiten_rewards", True)
    tokens = int(keys.number("max_new_tokens", default=1024))
    draft.set("sampling.max_new_tokens", tokens)
    draft.set(
        "data.max_length", int(draft.get("data.max_length")) + tokens, "Prompt and answer: cutoff_len limits prompts"
    )
    for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
        if (value := keys.number(name)) is not None:
            draft.set(f"sampling.{name}", value)


def convert_profiler(keys: ForeignKeys, draft: Draft) -> None:
    names = (
        "profiler_output_dir",
        "profiler_repeat",
        "profiler_record_shapes",
        "profiler_with_stack",
        "profile_modules",
    )
    if not keys.flag("enable_torch_profiler"):
        options = ("profiler_wait_steps", "profiler_warmup_steps", "profiler_active_steps", "profiler_profile_memory")
        draft.report_unneeded_keys(keys, "the profiler is off", *names, *options)
        return
    wait, warmup = keys.number("profiler_wait_steps", default=1), keys.number("profiler_warmup_steps", default=1)
    draft.set(
        "profiler", {"skip_first": int(wait + warmup), "active": int(keys.number("profiler_active_steps", default=3))}
    )
    if keys.flag("profiler_profile_memory"):
        draft.set("profiler.profile_memory", True)
