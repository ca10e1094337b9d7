"""The parts of a torchtune config that are special to a method."""

from collections.abc import Mapping
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.torchtune.data import read_source
from tunekit.importers.torchtune.model import choose_model, convert_adapter, convert_checkpoint
from tunekit.importers.torchtune.source import COMPONENT, Header

QAT = "quantization-aware training is not available"
UNSUPPORTED = {  # recipes of torchtune without a counterpart
    "quantize": "weights are quantized after training with `tune export MODEL OUT --type nf4` (or q8_0, q4_0)",
    "qat_distributed": f"{QAT}. Import the config of the full fine-tuning instead",
    "qat_single_device": f"{QAT}. Import the config of the full fine-tuning instead",
    "qat_lora_finetune_distributed": f"{QAT}. Import the config of the LoRA fine-tuning instead",
    "early_exit_finetune_distributed": "early exit (layer dropout with a loss at each layer) is not available",
}
RECIPES = {  # recipe of tunekit by the start of the name of one of torchtune
    "full_finetune": "sft",
    "lora_finetune": "sft",
    "lora_dora_finetune": "sft",
    "lora_dpo": "preference",
    "full_dpo": "preference",
    "knowledge_distillation": "distill",
    "ppo_full_finetune": "ppo",
    "grpo_full_finetune": "grpo",
    "async_grpo": "grpo",
    "eleuther_eval": "evaluate",
    "generate": "generate",
}
KD_LOSSES = {"ForwardKL": "forward_kl", "ReverseKL": "reverse_kl", "SymmetricKL": "symmetric_kl"}
LOSS_OPTIONS = ("num_output_chunks", "ignore_index", "tp_enabled", "mask_ignored_tokens", "enable_loss_parallel")


def find_recipe(config: Mapping[str, Any], named: str | None) -> str:
    """Recipe of tunekit for a config, and for the recipe that a command names. Raise UserError if there is none."""
    name = (named or "").rpartition("/")[2].removesuffix(".py")
    if name not in UNSUPPORTED:
        name = missing_method(config) or name
    if name in UNSUPPORTED:
        raise UserError(f"torchtune's recipe {name}: {UNSUPPORTED[name]}.")
    known = next((ours for start, ours in RECIPES.items() if name.startswith(start)), None)
    return known or recipe_by_keys(config)


def missing_method(config: Mapping[str, Any]) -> str | None:
    """Recipe without a counterpart that keys of a config need."""
    if isinstance(config.get("quantizer"), Mapping) and "QAT" in str(config["quantizer"].get(COMPONENT)):
        return "qat_distributed"
    if isinstance(config.get("quantizer"), Mapping) and not {"dataset", "tasks", "prompt"} & config.keys():
        return "quantize"
    return "early_exit_finetune_distributed" if {"early_exit_loss", "layer_dropout"} & config.keys() else None


def recipe_by_keys(config: Mapping[str, Any]) -> str:
    """Recipe for the keys of a config."""
    loss = config.get("loss")
    component = str(loss.get(COMPONENT)) if isinstance(loss, Mapping) else ""
    if "policy_model" in config or "PPO" in component:
        return "ppo"
    if {"grpo_samples", "orchestration"} & config.keys() or "GRPO" in component:
        return "grpo"
    if "kd_loss" in config or "teacher_model" in config:
        return "distill"
    if "rlhf" in component:
        return "preference"
    if "tasks" in config:
        return "evaluate"
    return "generate" if "prompt" in config and "dataset" not in config else "sft"


def convert_cross_entropy(keys: ForeignKeys, draft: Draft) -> None:
    """Loss of recipes with one loss: cross-entropy in chunks."""
    loss = keys.section("loss")
    name = str(loss.take(COMPONENT, default="")).rpartition(".")[2]
    if name and "CrossEntropy" not in name and "CEWith" not in name:
        draft.drop("loss._component_", name, "cross-entropy is used; for another loss, pass --import FILE.py")
    if smoothing := loss.number("label_smoothing", default=0):
        draft.set("loss.label_smoothing", smoothing)
    for option in LOSS_OPTIONS:
        if option in loss:
            draft.report_unneeded(
                loss.dotted(option), loss.take(option), "not needed: head and loss are computed in chunks"
            )


def convert_preference_loss(keys: ForeignKeys, draft: Draft, header: Header) -> None:
    loss = keys.section("loss")
    name = str(loss.take(COMPONENT, default="DPOLoss")).rpartition(".")[2]
    kinds = {"DPOLoss": "dpo", "RSOLoss": "hinge", "IPOLoss": "ipo", "SimPOLoss": "simpo"}
    if name not in kinds:
        draft.drop("loss._component_", name, "this loss is not available: dpo")
    kind = kinds.get(name, "dpo")
    draft.set("loss.kind", kind)
    beta_name = {"hinge": "gamma", "ipo": "tau"}.get(kind, "beta")
    draft.set("loss.beta", loss.number(beta_name, default=2.0 if kind == "simpo" else 0.1))
    if kind == "simpo":
        draft.set("loss.simpo_gamma", loss.number("gamma", default=0.5))
    if kind in ("dpo", "simpo") and (smoothing := loss.number("label_smoothing", default=0)):
        draft.set("loss.label_smoothing", smoothing)
    reference = keys.section("ref_checkpointer")
    if reference.values:
        model, _ = convert_checkpoint(reference, draft, header, None)
        if model == draft.get("model"):
            draft.report_unneeded("ref_checkpointer", model, "not needed: the reference is the model before training")
        else:
            draft.drop("ref_checkpointer", model, "the reference is always the model before training")


def convert_distillation(keys: ForeignKeys, draft: Draft, header: Header) -> None:
    teacher = keys.section("teacher_model")
    component = str(teacher.take(COMPONENT, default=""))
    model, comment = convert_checkpoint(keys.section("teacher_checkpointer"), draft, header, component)
    draft.set("teacher.model", model, comment)
    trained = Draft()
    convert_adapter(teacher, component, trained)
    if trained.get("adapter") is not None:
        note = "the teacher is a checkpoint without an adapter; merge it first"
        draft.drop("teacher_model", component, note)
    if trained.get("quantization") is not None:
        draft.set("teacher.quantization", trained.get("quantization"))
    loss = keys.section("kd_loss")
    name = str(loss.take(COMPONENT, default="ForwardKLLoss")).rpartition(".")[2]
    kind = next((ours for start, ours in KD_LOSSES.items() if start in name), None)
    if kind is None:
        draft.drop("kd_loss._component_", name, "this divergence is not available: forward_kl")
    draft.set("loss.kind", kind or "forward_kl")
    ratio = keys.number("kd_ratio", default=0.5)
    draft.set("loss.kd_ratio", float(ratio))
    for option in LOSS_OPTIONS:
        if option in loss:
            draft.report_unneeded(
                loss.dotted(option), loss.take(option), "not needed: the divergence is computed in chunks"
            )
    cross_entropy = keys.section("loss")
    if cross_entropy.take(COMPONENT) is not None:
        draft.report_unneeded("loss", "", "not needed: cross-entropy is the rest of loss.kd_ratio")
    for option in LOSS_OPTIONS:
        cross_entropy.take(option)


def convert_ppo(keys: ForeignKeys, draft: Draft, header: Header) -> None:
    """PPO: a rollout of `batch_size` answers, which several steps of `ppo_batch_size` answers train on."""
    size, step = int(keys.number("batch_size", default=64)), int(keys.number("ppo_batch_size", default=64))
    accumulation = int(keys.number("gradient_accumulation_steps", default=1))
    passes = int(keys.number("ppo_epochs", default=1))
    draft.set("num_mini_batches", max(1, size // step))
    draft.set("num_ppo_epochs", passes)
    if (episodes := keys.number("num_steps")) is not None:
        steps = int(episodes) // size * passes * max(1, size // step)
        draft.set("max_steps", steps, f"num_steps counts answers: {int(episodes)} / {size} rollouts")
    keys.values |= {"batch_size": max(1, step // accumulation), "gradient_accumulation_steps": accumulation}
    if (forward := keys.number("forward_batch_size")) is not None:
        draft.set("max_num_seqs", int(forward))
    convert_ppo_loss(keys, draft)
    convert_sampling(keys, draft)
    reward = keys.section("reward_checkpointer")
    model, comment = convert_checkpoint(reward, draft, header, None)
    rewards: list[dict[str, Any]] = [{"kind": "reward_model", "model": model}]
    if minimum := keys.number("min_response_length"):
        penalty = abs(float(draft.get("loss.missing_eos_penalty") or 3.0))
        rewards.append({"kind": "length", "min_tokens": int(minimum), "weight": penalty})
    draft.set("rewards", rewards, comment)
    keys.section("reward_and_value_model").values.clear()
    for name in ("value_checkpointer", "ref_policy_checkpointer"):
        section = keys.section(name)
        other, _ = choose_model(section.peek("checkpoint_dir"), header, None) if section.values else (None, "")
        section.values.clear()
        if name == "value_checkpointer" and other is not None:
            draft.differs(
                name, other, "values come from a new head next to the language model head, not from a second model"
            )
        elif other is not None and other != draft.get("model"):
            draft.drop(name, other, "the reference is always the model before training")


def convert_ppo_loss(keys: ForeignKeys, draft: Draft) -> None:
    loss = keys.section("loss")
    loss.take(COMPONENT)
    draft.set("loss.cliprange", loss.number("epsilon", default=0.1))
    draft.set("loss.cliprange_value", loss.number("value_clip_range", default=0.2))
    draft.set("loss.vf_coef", loss.number("value_coeff", default=0.1))
    for name, key in (("kl_coeff", "kl_coef"), ("gamma", "gamma"), ("lmbda", "lam")):
        if (value := keys.number(name)) is not None:
            draft.set(f"loss.{key}", float(value))
    if keys.flag("whiten_rewards"):
        draft.set("loss.whiten_rewards", True)
    penalty = keys.number("reward_penalty", default=-3)
    if keys.flag("penalise_no_eos", default=True):
        comment = "Subtracted from the score, which torchtune replaces by the penalty"
        draft.set("loss.missing_eos_penalty", abs(float(penalty)), comment)


def convert_sampling(keys: ForeignKeys, draft: Draft) -> None:
    if (count := keys.number("max_generated_tokens", "max_new_tokens")) is not None:
        draft.set("sampling.max_new_tokens", int(count))
    if (temperature := keys.number("temperature")) is not None:
        draft.set("sampling.temperature", float(temperature))
    if (top_k := keys.number("top_k")) is not None:
        draft.set("sampling.top_k", int(top_k))
    if (stops := keys.take("stop_token_ids")) is not None:
        note = "stop tokens of the model end an answer; for others, set sampling.stop_strings to their texts"
        draft.drop("stop_token_ids", stops, note)


def convert_grpo(keys: ForeignKeys, draft: Draft, num_devices: int) -> None:
    samples, prompts = int(keys.number("grpo_samples", default=8)), int(keys.number("batch_size", default=1))
    accumulation = int(keys.number("gradient_accumulation_steps", default=1))
    draft.set("num_generations", samples)
    answers = samples * prompts * accumulation * num_devices
    draft.set("global_batch_size", answers, f"{prompts} prompts x {samples} answers x {num_devices} devices")
    if (forward := keys.number("forward_batch_size")) is not None:
        draft.set("micro_batch_size", int(forward))
    if (passes := keys.number("ppo_epochs", default=1)) > 1:
        draft.set("num_iterations", int(passes))
    if (steps := keys.number("num_steps")) is not None:
        draft.set("max_steps", int(steps))
    loss = keys.section("loss")
    name = str(loss.take(COMPONENT, default="")).rpartition(".")[2]
    draft.set("loss.kind", "grpo")
    if name not in (
        "",
        "GRPOLoss",
        "GRPOSimpleLoss",
        "GRPOCompletionLoss",
        "LinearGRPOLoss",
        "GRPOWithChunkedOutputLoss",
    ):
        draft.drop("loss._component_", name, "grpo is used")
    for option, key in (("kl_coeff", "beta"), ("epsilon", "epsilon")):
        draft.set(f"loss.{key}", float(loss.number(option, default=0.1)))
    convert_sampling(keys, draft)
    note = "rewards are those of GSM8K: the number and the format of the answer"
    for name in ("reward_functions", "reward_fn"):
        if (functions := keys.take(name)) is not None:
            draft.differs(name, functions, note)
    draft.set("rewards", [{"kind": "gsm8k_correctness"}, {"kind": "gsm8k_format"}])


def convert_prompt_data(value: Any, draft: Draft, length: int, chat_template: str | None) -> None:
    """Prompts of recipes that sample answers."""
    keys = ForeignKeys(value if isinstance(value, Mapping) else {}, "dataset")
    builder = str(keys.take(COMPONENT, default="")).rpartition(".")[2]
    if builder == "gsm8k_dataset":
        if (part := keys.take("partition")) is not None:
            draft.differs("dataset.partition", part, "all rows of the split are used; set data.split to a slice")
        data: dict[str, Any] = {**read_source(keys, "openai/gsm8k:main", draft), "columns": {"prompt": "question"}}
        draft.differs("dataset", builder, "questions of GSM8K as user messages; set data.system_prompt to ask for tags")
    else:
        column = keys.take("column", default="prompt")
        data = {**read_source(keys, None, draft), "prompt_format": "text"}
        if column != "prompt":
            data["columns"] = {"prompt": column}
        keys.take("add_eos", "packed")
    for dotted, child in keys.rest():
        draft.drop(dotted, child, "prompts have no such option")
    template = {"chat_template": chat_template} if chat_template and data.get("prompt_format") != "text" else {}
    draft.set("data", {**data, "max_length": length, **template})


def convert_evaluation(keys: ForeignKeys, draft: Draft) -> None:
    draft.set("tasks", keys.texts("tasks"))
    for name in ("limit", "batch_size", "include_path"):
        if (value := keys.take(name)) is not None:
            draft.set(name, value)
    if keys.flag("chat_template", "apply_chat_template"):
        draft.set("apply_chat_template", True)
    if (length := keys.number("max_seq_length")) is not None:
        draft.report_unneeded("max_seq_length", length, "not needed: the context of the model")
    if (seed := keys.number("seed")) is not None:
        draft.report_unneeded("seed", seed, "not needed: questions are answered greedily")


def convert_generation(keys: ForeignKeys, draft: Draft, has_markers: bool) -> None:
    prompt = keys.take("prompt", default="")
    if isinstance(prompt, Mapping):
        user, system = prompt.get("user"), prompt.get("system")
        if isinstance(user, Mapping):
            if user.get("image"):
                raise UserError("prompt.user.image: models read text only. Remove the image.")
            user = user.get("text")
        draft.set("prompts", [str(user)])
        if system:
            draft.set("system_prompt", str(system))
    else:
        draft.set("prompts", [str(prompt)])
    if not has_markers:
        draft.set("apply_chat_template", False, "The tokenizer has no chat format there")
        if draft.get("system_prompt") is not None:
            draft.tree["prompts"] = [f"{draft.tree.pop('system_prompt')}{draft.get('prompts')[0]}"]
    convert_sampling(keys, draft)
    if (seed := keys.number("seed")) is not None:
        draft.set("sampling.seed", int(seed))
