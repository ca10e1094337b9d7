"""Configs of torchtune's package by name, such as llama3_2/1B_lora_single_device, and their counterparts."""

import re
from collections.abc import Collection
from typing import NamedTuple

from tunekit.errors import UserError
from tunekit.importers.torchtune.recipes import RECIPES, UNSUPPORTED

NAME = re.compile(r"(?:dev/)?(?P<family>[a-z]\w*)/(?:(?P<teacher>[\d.]+)B?_to_)?(?P<size>mini|[\d.]+B)_(?P<method>\w+)")
METHODS = (  # pattern of the method, recipe, and ends of config names of tunekit with the overrides that they need
    (r"qat", None, ()),
    (r"early_exit", None, ()),
    (r"KD", "distill", (("distill", ""),)),
    (r"lora_dpo", "preference", (("dpo_lora", ""),)),
    (r"full_dpo", "preference", (("dpo_lora", "adapter=none optimizer.lr=1e-6"),)),
    (r"full_ppo", "ppo", (("ppo_full", ""),)),
    (r"grpo", "grpo", (("grpo_gsm8k", ""),)),
    (r"qdora", "sft", (("qlora", "adapter=dora"), ("lora", "adapter=dora quantization=nf4"))),
    (r"dora", "sft", (("lora", "adapter=dora"),)),
    (r"qlora", "sft", (("qlora", ""), ("lora", "quantization=nf4"))),
    (r"lora", "sft", (("lora", ""),)),
    (r"full", "sft", (("full", ""), ("lora", "adapter=none optimizer.lr=2e-5"))),
)
MODELS = {  # Hub names that do not follow from those of the sizes
    "llama2": "meta-llama/Llama-2-{}b-hf", "code_llama2": "codellama/CodeLlama-{}b-hf",
    "llama3": "meta-llama/Meta-Llama-3-{}B-Instruct", "llama3_1": "meta-llama/Llama-3.1-{}B-Instruct",
    "llama3_2": "meta-llama/Llama-3.2-{}B-Instruct", "llama3_3": "meta-llama/Llama-3.3-{}B-Instruct",
    "llama3_2_vision": "meta-llama/Llama-3.2-{}B-Vision-Instruct", "mistral": "mistralai/Mistral-{}B-v0.1",
    "gemma": "google/gemma-{}b", "gemma2": "google/gemma-2-{}b", "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "phi4": "microsoft/phi-4", "qwen2": "Qwen/Qwen2-{}B-Instruct", "qwen2_5": "Qwen/Qwen2.5-{}B-Instruct",
    "qwen3": "Qwen/Qwen3-{}B",
}  # fmt: skip
FALLBACK = "llama3_2/1b"  # its configs are used with another model


class Counterpart(NamedTuple):
    """A config of tunekit, its recipe, and overrides that make it the counterpart of one of torchtune."""

    recipe: str
    config: str
    overrides: tuple[str, ...]


def is_packaged_name(word: str) -> bool:
    """Whether a word looks like the name of a config of torchtune's package."""
    return NAME.fullmatch(word) is not None or word in ("generation", "quantization", "eleuther_evaluation")


def find_counterpart(name: str, configs: Collection[str]) -> Counterpart:
    """Config of tunekit with the same model and method. Raise UserError for a method without a counterpart."""
    name = name.removesuffix(".yaml")
    last = name.rpartition("/")[2]
    if "evaluation" in last:
        return make_counterpart("evaluate", "nano/known", name, ("baseline=null", "tasks=[truthfulqa_mc2]"))
    if "generation" in last:
        return make_counterpart("generate", "nano/generate", name, ())
    match = NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"torchtune's config {name}: {UNSUPPORTED['quantize'] if 'quant' in name else 'has no counterpart'}."
        )
    family, size, method = match["family"], match["size"], match["method"]
    if "vision" in family:
        raise UserError(f"torchtune's config {name}: trains on images, and models read text only here.")
    _, recipe, ends = next((row for row in METHODS if re.search(row[0], name)), (None, None, ()))
    if recipe is None:
        reason = UNSUPPORTED["qat_distributed" if "qat" in method else "early_exit_finetune_distributed"]
        raise UserError(f"torchtune's config {name}: {reason}.")
    own_size = size.lower().replace(".", "_")
    for end, overrides in ends:
        if (config := f"{family}/{own_size}_{end}") in configs and not match["teacher"]:
            return Counterpart(recipe, config, tuple(overrides.split()))
    return find_fallback(name, family, size, recipe, ends, configs)


def find_fallback(
    name: str, family: str, size: str, recipe: str, ends: Collection[tuple[str, str]], configs: Collection[str]
) -> Counterpart:
    """Config of another size or family with the same method, with the model of the name."""
    for end, overrides in ends:
        same_family = sorted(config for config in configs if re.fullmatch(rf"{family}/[\d_a-z]+b_{end}", config))
        others = [f"{FALLBACK}_{end}", f"mistral/7b_{end}", f"llama3_2/3b_{end}"]
        for config in (*same_family, *others):
            if config in configs:
                return make_counterpart(recipe, config, name, tuple(overrides.split()))
    raise UserError(f"torchtune's config {name}: no config of tunekit has this method. See tune ls {recipe}")


def make_counterpart(recipe: str, config: str, name: str, overrides: tuple[str, ...]) -> Counterpart:
    """A config with the model, and the teacher, of the name of another one."""
    match = NAME.fullmatch(name)
    family = match["family"] if match else name.partition("/")[0]
    models = [f"model={get_hub_name(family, match['size'] if match else '7B')}"]
    if match and match["teacher"]:
        teacher_family = "llama3_1" if family == "llama3_2" else family
        models.append(f"teacher.model={get_hub_name(teacher_family, match['teacher'])}")
    return Counterpart(recipe, config, (*models, *overrides))


def get_hub_name(family: str, size: str) -> str:
    return MODELS.get(family, MODELS["llama2"]).format(size.removesuffix("B"))


def is_recipe(word: str) -> bool:
    """Whether a word is the name of a recipe of torchtune."""
    name = word.removeprefix("dev/").removesuffix(".py")
    return name in UNSUPPORTED or (name != "generate" and any(name.startswith(start) for start in RECIPES))
