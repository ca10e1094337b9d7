"""Keys of adapters and quantization of PEFT and bitsandbytes."""

from typing import Any, NamedTuple

from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys

# Modules of checkpoints that are several modules here.
SPLIT_MODULES = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "query_key_value": ["q_proj", "k_proj", "v_proj"],
    "c_attn": ["q_proj", "k_proj", "v_proj"],
    "W_pack": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "dense_h_to_4h": ["gate_proj", "up_proj"],
    "dense_4h_to_h": ["down_proj"],
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "embed_tokens": ["embed_tokens"],
    "wte": ["embed_tokens"],
    "all": ["all-linear"],
    "all-linear": ["all-linear"],
}
DETAILS = {
    "loraplus_lr_ratio": "loraplus_lr_ratio",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_trainable_token_indices": "trainable_token_indices",
}
PEFT_TARGETS = ["q_proj", "v_proj"]
PEFT_COMMENT = "PEFT's choice for most models"


class AdapterKeys(NamedTuple):
    """Names of the keys of LoRA, and their defaults."""

    rank: str = "lora_r"
    default_rank: int = 8
    default_alpha: float | None = None  # None: twice the rank
    default_dropout: float = 0.0
    targets: str = "lora_target_modules"
    default_targets: str | None = None
    saved: str = "lora_modules_to_save"
    dora: str = "use_dora"
    rslora: str = "use_rslora"


def convert_adapter(keys: ForeignKeys, draft: Draft, names: AdapterKeys) -> None:
    """LoRA or DoRA."""
    draft.set("adapter", "dora" if keys.flag(names.dora) else "lora")
    rank = int(keys.number(names.rank, default=names.default_rank))
    alpha = keys.number("lora_alpha", default=2 * rank if names.default_alpha is None else names.default_alpha)
    draft.set("adapter.rank", rank)
    draft.set("adapter.alpha", float(alpha))
    if dropout := float(keys.number("lora_dropout", default=names.default_dropout)):
        draft.set("adapter.dropout", dropout)
    targets = keys.take(names.targets, default=names.default_targets)
    everything = keys.flag("lora_target_linear")
    draft.set("adapter.target_modules", "all-linear" if everything else to_modules(targets))
    if targets is None and not everything:
        draft.comments["adapter.target_modules"] = PEFT_COMMENT
    elif everything and targets:
        extra = to_modules(targets)
        known = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all-linear"}
        others = [name for name in ([extra] if isinstance(extra, str) else extra) if name not in known]
        if others:
            draft.set("adapter.target_modules", ["all-linear", *others])
    if keys.flag(names.rslora):
        draft.set("adapter.use_rslora", True)
    if saved := keys.texts(names.saved):
        draft.set("adapter.modules_to_save", saved)
    convert_adapter_details(keys, draft)


def convert_adapter_details(keys: ForeignKeys, draft: Draft) -> None:
    for name, key in DETAILS.items():
        if (value := keys.take(name)) is not None:
            draft.set(f"adapter.{key}", value)
    init = keys.take("peft_init_lora_weights", "init_lora_weights")
    if isinstance(init, str) and init.startswith("pissa"):
        draft.set("adapter.init", "pissa")
    elif init not in (None, True, "true"):
        draft.drop("init_lora_weights", init, "initializations are default and pissa")
    if (layers := keys.take("peft_layers_to_transform", "layers_to_transform")) is not None:
        numbers = "|".join(str(layer) for layer in (layers if isinstance(layers, list) else [layers]))
        targets = draft.get("adapter.target_modules")
        names = "|".join([targets] if isinstance(targets, str) else targets)
        names = r"(attn|mlp)\..+" if names == "all-linear" else rf"(.+\.)?({names})"
        draft.set("adapter.target_modules", [rf"layers\.({numbers})\.{names}"])


def to_modules(targets: Any) -> str | list[str]:
    """Modules of a list, or of a text with commas. The default is that of PEFT for most models."""
    if targets is None or targets == "" or targets == []:
        return list(PEFT_TARGETS)
    if isinstance(targets, str) and not any(char in targets for char in "\\(*[|"):
        targets = [part.strip() for part in targets.split(",") if part.strip()]
    if isinstance(targets, str):
        return targets.replace("model.layers", "layers").replace("self_attn", "attn")
    modules = list(dict.fromkeys(new for name in targets for new in SPLIT_MODULES.get(str(name), [str(name)])))
    return "all-linear" if modules == ["all-linear"] else modules


def convert_quantization(keys: ForeignKeys, draft: Draft) -> None:
    """Weights in 4 or 8 bits, of bitsandbytes."""
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if not four:
        note = "has no effect without load_in_4bit"
        draft.report_unneeded_keys(
            keys, note, "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_use_double_quant"
        )
    kind = str(keys.take("bnb_4bit_quant_type", "quantization_type", default="nf4")).lower()
    nested = keys.take("use_bnb_nested_quant", "bnb_4bit_use_double_quant")
    for name in ("bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"):
        if (value := keys.take(name)) is not None:
            draft.report_unneeded(
                name, value, "not needed: weights are stored as bytes, and computed with in precision.compute_dtype"
            )
    if four or eight:
        set_quantization(draft, 4 if four else 8, kind, nested is True)


def set_quantization(draft: Draft, bits: int, kind: str, double_quant: bool) -> None:
    """Weights in nf4 or fp4, or in 8 bits. `double_quant` quantizes the block scales of 4 bits too."""
    if bits > 4:
        draft.set("quantization", "float8", "8 bits; bitsandbytes stores int8")
        return
    kind = kind if kind in ("nf4", "fp4") else "nf4"
    draft.set("quantization", {"kind": kind, "double_quant": True} if double_quant else kind)
    if bits < 4:
        draft.differs("quantization_bit", bits, "4 bits")


def report_unneeded_adapter(keys: ForeignKeys, draft: Draft, names: AdapterKeys) -> None:
    """Report keys of LoRA in a config that trains all weights."""
    options = (names.rank, "lora_alpha", "lora_dropout", names.targets, names.saved, names.dora, names.rslora)
    options += ("lora_target_linear", "lora_fan_in_fan_out", "lora_target_parameters", *DETAILS)
    draft.report_unneeded_keys(keys, "has no effect without an adapter", *options)
