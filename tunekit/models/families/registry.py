"""Maps the `model_type` of a config.json to its family."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

from tunekit.errors import UserError
from tunekit.models.families import (
    classifiers,
    deepseek,
    gemma,
    gemma4,
    glm,
    glm_moe,
    gpt_oss,
    granite,
    granite_moe,
    llama,
    llama4,
    mistral,
    mixtral,
    moe,
    olmo,
    olmoe,
    phi,
    qwen,
    qwen3_5,
    qwen3_next,
    qwen_moe,
    smollm3,
)
from tunekit.models.families.base import LLAMA, Config
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import KeyRule


@dataclass(frozen=True)
class Family:
    """Function from config.json to a DecoderSpec, and the weight map of an architecture."""

    spec: Callable[[Config], DecoderSpec]
    table: tuple[KeyRule, ...] = LLAMA
    config_table: Callable[[Config], tuple[KeyRule, ...]] = lambda _: ()  # further rules, with priority
    module_table: tuple[KeyRule, ...] = ()  # module names in transformers, if `table` starts with older names
    transposed_experts: bool = False  # of transformers modules, which PEFT does not know
    unused_heads: tuple[KeyRule, ...] = ()  # heads that a classification head replaces

    @property
    def modules(self) -> tuple[KeyRule, ...]:
        """Weight map for adapter files, whose names follow the modules of transformers."""
        return self.module_table + self.table


FAMILIES = {
    "deepseek_v2": Family(deepseek.v2, deepseek.TABLE),
    "deepseek_v3": Family(deepseek.v3, deepseek.TABLE, moe.mtp_layers),
    "gemma": Family(gemma.gemma),
    "gemma2": Family(gemma.gemma2, gemma.TABLE),
    "gemma3": Family(gemma.vision, gemma.VISION),
    "gemma3_text": Family(gemma.gemma3, gemma.TABLE),
    "gemma4": Family(gemma4.vision, gemma4.VISION, gemma4.vision_config_table),
    "gemma4_text": Family(gemma4.spec, gemma4.TABLE, gemma4.config_table),
    "glm": Family(glm.glm, glm.TABLE),
    "glm4": Family(glm.glm4, glm.TABLE4),
    "glm4_moe": Family(glm_moe.spec, glm_moe.TABLE, moe.mtp_layers),
    "gpt_oss": Family(gpt_oss.spec, gpt_oss.TABLE),
    "granite": Family(granite.spec),
    "granitemoe": Family(granite_moe.spec, granite_moe.TABLE, module_table=granite_moe.LIVE),
    "kimi_k2": Family(deepseek.v3, deepseek.TABLE, moe.mtp_layers),
    "llama": Family(llama.spec),
    "llama4": Family(llama4.vision, llama4.VISION, module_table=llama4.LIVE, transposed_experts=True),
    "llama4_text": Family(llama4.spec, llama4.TABLE, transposed_experts=True),
    "ministral": Family(mistral.ministral),
    "ministral3": Family(mistral.ministral3),
    "mistral": Family(mistral.mistral),
    "mistral3": Family(mistral.vision, mistral.VISION),
    "mixtral": Family(mixtral.spec, mixtral.TABLE, module_table=(*moe.ROUTER, *moe.EXPERTS)),
    "olmo2": Family(olmo.olmo2, olmo.TABLE),
    "olmo3": Family(olmo.olmo3, olmo.TABLE),
    "olmoe": Family(olmoe.spec, olmoe.TABLE),
    "phi3": Family(phi.spec, phi.TABLE),
    "qwen2": Family(qwen.qwen2),
    "qwen2_5_vl": Family(qwen.qwen2_vision, qwen.VISION),
    "qwen2_moe": Family(qwen_moe.qwen2, qwen_moe.TABLE),
    "qwen2_vl": Family(qwen.qwen2_vision, qwen.VISION),
    "qwen3": Family(qwen.qwen3),
    "qwen3_5": Family(qwen3_5.vision, qwen3_5.VISION),
    "qwen3_5_moe": Family(qwen3_5.moe_vision, qwen3_5.MOE_VISION),
    "qwen3_5_moe_text": Family(qwen3_5.moe, qwen3_5.MOE_TEXT),
    "qwen3_5_text": Family(qwen3_5.dense, qwen3_5.TEXT),
    "qwen3_moe": Family(qwen_moe.qwen3, qwen_moe.TABLE),
    "qwen3_next": Family(qwen3_next.spec, qwen3_next.TABLE),
    "qwen3_vl": Family(qwen.qwen3_vision, qwen.VISION),
    "smollm3": Family(smollm3.spec),
}


def find_family(config: Config, where: str) -> tuple[Family, DecoderSpec]:
    """Family and spec of a config.json. `where` is its path. Raises UserError."""
    model_type = config.get("model_type")
    if model_type is None:
        raise UserError(f"{where}: 'model_type' is missing")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        suggestions = difflib.get_close_matches(str(model_type), FAMILIES, 1)
        hint = f", did you mean {suggestions[0]!r}?" if suggestions else ""
        raise UserError(f"{where}: model_type {model_type!r} is not supported{hint} (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[model_type]
    try:
        spec = family.spec(config)
        family = replace(family, table=family.config_table(config) + family.table)
        score = classifiers.score_head(config)
        return (family, spec) if score is None else (with_score_head(family), spec.with_score_head(score))
    except KeyError as error:
        raise UserError(f"{where}: {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error


def with_score_head(family: Family) -> Family:
    """The family with the names of a classification head."""
    rows = {
        "table": classifiers.classifier_table(family.table),
        "module_table": classifiers.classifier_table(family.module_table),
    }
    return replace(family, **rows, unused_heads=classifiers.lm_head_names(family.module_table + family.table))
