"""Maps the `model_type` of a config.json to its family."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tunekit.errors import UserError, did_you_mean
from tunekit.models.families import (
    bamba,
    classifiers,
    cohere,
    deepseek,
    ernie,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    llama4,
    mistral,
    mllama,
    moe_base,
    nemotron,
    olmo,
    phi,
    qwen,
    qwen3_next,
)
from tunekit.models.families.base import (
    LLAMA,
    Config,
    TieRule,
    either_ties,
    inner_ties,
    outer_ties,
    outer_ties_by_default,
    text_config,
    text_model_names,
)
from tunekit.models.families.config_checks import check_config_values, check_spec
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
    text_type: str = ""  # of multimodal models: `model_type` of the text section of config.json, which `spec` gets
    tie_rule: TieRule = outer_ties  # of multimodal models: the value of `tie_word_embeddings`, as in transformers

    @property
    def modules(self) -> tuple[KeyRule, ...]:
        """Weight map for adapter files, whose names follow the modules of transformers."""
        return self.module_table + self.table


FAMILIES = {
    "bamba": Family(bamba.bamba, bamba.TABLE),
    "cohere": Family(cohere.cohere),
    "cohere2": Family(cohere.cohere2),
    "deepseek_v2": Family(deepseek.v2, deepseek.TABLE),
    "deepseek_v3": Family(deepseek.v3, deepseek.TABLE, moe_base.mtp_layers),
    "ernie4_5": Family(ernie.ernie),
    "ernie4_5_moe": Family(ernie.ernie_moe, ernie.MOE_TABLE, module_table=ernie.MODULES),
    "falcon_h1": Family(bamba.falcon_h1, bamba.FALCON_TABLE),
    "gemma": Family(gemma.gemma),
    "gemma2": Family(gemma.gemma2, gemma.TABLE),
    "gemma3": Family(gemma.gemma3_vision, gemma.VISION, text_type="gemma3_text", tie_rule=outer_ties_by_default),
    "gemma3_text": Family(gemma.gemma3, gemma.TABLE),
    "gemma3n": Family(
        gemma3n.spec,
        gemma3n.VISION,
        gemma3n.config_table,
        text_type="gemma3n_text",
        tie_rule=outer_ties_by_default,
    ),
    "gemma3n_text": Family(gemma3n.spec, gemma3n.TABLE, gemma3n.config_table),
    "gemma4": Family(
        gemma4.spec,
        gemma4.VISION,
        gemma4.config_table,
        text_type="gemma4_text",
        tie_rule=outer_ties_by_default,
    ),
    "gemma4_text": Family(gemma4.spec, gemma4.TABLE, gemma4.config_table),
    "glm": Family(glm.glm, glm.TABLE),
    "glm4": Family(glm.glm4, glm.TABLE4),
    "glm4_moe": Family(glm.glm4_moe, glm.MOE_TABLE, moe_base.mtp_layers),
    "gpt_oss": Family(gpt_oss.spec, gpt_oss.TABLE),
    "granite": Family(granite.granite),
    "granitemoe": Family(granite.granite_moe, granite.TABLE, module_table=granite.LIVE),
    "granitemoehybrid": Family(granite.hybrid, granite.HYBRID_TABLE, granite.hybrid_config_table, granite.LIVE),
    "hunyuan_v1_dense": Family(hunyuan.dense, hunyuan.TABLE),
    "kimi_k2": Family(deepseek.v3, deepseek.TABLE, moe_base.mtp_layers),
    "lfm2": Family(lfm2.spec, lfm2.TABLE),
    "llama": Family(llama.spec),
    "llama4": Family(
        llama4.spec,
        llama4.VISION,
        module_table=llama4.LIVE,
        transposed_experts=True,
        text_type="llama4_text",
        tie_rule=inner_ties,
    ),
    "llama4_text": Family(llama4.spec, llama4.TABLE, transposed_experts=True),
    "ministral": Family(mistral.ministral),
    "ministral3": Family(mistral.ministral3),
    "mistral": Family(mistral.mistral),
    "mistral3": Family(mistral.vision, mistral.VISION, text_type="mistral"),
    "mixtral": Family(mistral.mixtral, mistral.MIXTRAL_TABLE, module_table=(*moe_base.ROUTER, *moe_base.EXPERTS)),
    "mllama": Family(mllama.spec, mllama.TABLE, mllama.config_table, text_type="mllama_text_model"),
    "nemotron_h": Family(nemotron.spec, nemotron.TABLE, module_table=nemotron.NAMES),
    "olmo2": Family(olmo.olmo2, olmo.TABLE),
    "olmo3": Family(olmo.olmo3, olmo.TABLE),
    "olmoe": Family(olmo.olmoe, olmo.MOE_TABLE),
    "phi3": Family(phi.spec, phi.TABLE),
    "qwen2": Family(qwen.qwen2),
    "qwen2_5_vl": Family(qwen.qwen2_vision, qwen.VISION, text_type="qwen2", tie_rule=either_ties),
    "qwen2_moe": Family(qwen.qwen2_moe, qwen.MOE_TABLE),
    "qwen2_vl": Family(qwen.qwen2_vision, qwen.VISION, text_type="qwen2", tie_rule=either_ties),
    "qwen3": Family(qwen.qwen3),
    "qwen3_5": Family(qwen3_next.dense, qwen3_next.VISION, text_type="qwen3_5_text"),
    "qwen3_5_moe": Family(qwen3_next.moe, qwen3_next.MOE_VISION, text_type="qwen3_5_moe_text"),
    "qwen3_5_moe_text": Family(qwen3_next.moe, qwen3_next.MOE_TEXT),
    "qwen3_5_text": Family(qwen3_next.dense, qwen3_next.TEXT),
    "qwen3_moe": Family(qwen.qwen3_moe, qwen.MOE_TABLE),
    "qwen3_next": Family(qwen3_next.spec, qwen3_next.TABLE),
    "qwen3_vl": Family(qwen.qwen3_vision, qwen.VISION, text_type="qwen3"),
    "seed_oss": Family(llama.seed_oss),
    "smollm3": Family(llama.smollm3),
}


def find_family(config: Config, where: str) -> tuple[Family, DecoderSpec]:
    """Family and spec of a config.json. `where` is its path. Raises UserError."""
    model_type = config.get("model_type")
    if model_type is None:
        raise UserError(f"{where}: 'model_type' is missing")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = did_you_mean(str(model_type), FAMILIES)
        raise UserError(f"{where}: model_type {model_type!r} is not supported.{hint} Supported: {', '.join(FAMILIES)}.")
    family = FAMILIES[model_type]
    try:
        check_config_values(config)
        section = text_config(config, family.text_type, family.tie_rule) if family.text_type else config
        spec, rules = family.spec(section), family.config_table(section)
        check_spec(spec)
        family = replace(family, table=(text_model_names(rules) if family.text_type else rules) + family.table)
        if classifiers.is_base_model(config):
            return without_head(family, spec), replace(spec, tie_word_embeddings=True)
        score = classifiers.score_head(config)
        return (family, spec) if score is None else (with_score_head(family), spec.with_score_head(score))
    except KeyError as error:
        raise UserError(f"{where}: {error} is missing") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise UserError(f"{where}: invalid value ({type(error).__name__}: {error})") from error


def with_score_head(family: Family) -> Family:
    """The family with the names of a classification head."""
    table, modules = map(classifiers.classifier_table, (family.table, family.module_table))
    lm_heads = tuple(row for row in family.modules if row.ours == "head")
    return replace(family, table=table, module_table=modules, unused_heads=lm_heads)


def without_head(family: Family, spec: DecoderSpec) -> Family:
    """The family with the names of a base model, with or without the prefix of a language model.

    The decoder ties its head to the embedding, so that it needs no weights. Heads in the files are not read or saved.
    """
    modules = classifiers.base_model_table(family.modules)
    unused_heads = () if spec.tie_word_embeddings else tuple(row for row in family.modules if row.ours == "head")
    return replace(family, table=family.table + modules, module_table=modules, unused_heads=unused_heads)
