"""The model of a torchtune config: its name on the Hub, its adapter, and the format of its tokenizer."""

import re
from pathlib import Path
from typing import NamedTuple

from tunekit.errors import UserError
from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.torchtune.source import COMPONENT, Header, clean_path

# Hub names by builder, without the prefixes lora_ and qlora_. torchtune knows a model by its builder and its directory.
HUB_NAMES = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "code_llama2_7b": "codellama/CodeLlama-7b-hf",
    "code_llama2_13b": "codellama/CodeLlama-13b-hf",
    "code_llama2_70b": "codellama/CodeLlama-70b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama3_1_405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama3_2_1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3_2_vision_11b": "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "llama3_2_vision_90b": "meta-llama/Llama-3.2-90B-Vision-Instruct",
    "llama3_3_70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama4_scout_17b_16e": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "llama4_maverick_17b_128e": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "gemma_2b": "google/gemma-2b",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi4_14b": "microsoft/phi-4",
    "qwen3_32b": "Qwen/Qwen3-32B",  # without a base
    "qwen3_moe_30b_a3b_base": "Qwen/Qwen3-30B-A3B-Base",
    "qwen3_moe_30b_a3b_instruct": "Qwen/Qwen3-30B-A3B",
    "qwen3_moe_235b_a22b": "Qwen/Qwen3-235B-A22B",
}
QWEN_SIZE = re.compile(r"qwen(2_5|2|3)_(\d+(?:_\d+)?)b(_base|_instruct)?")
PREFIX = re.compile(r"^(qlora|lora)_")
LORA_NAMES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "output": "lm_head"}
CHECKPOINT_FILES = "not needed: the files of a checkpoint are found, and its config.json describes the model"
CHECKPOINTERS = ("FullModelHFCheckpointer", "DistributedCheckpointer", "FullModelMetaCheckpointer")


class TextFormat(NamedTuple):
    """How a tokenizer of torchtune writes a conversation: a chat template, or None for texts without markers."""

    chat_template: str | None
    has_markers: bool = True
    final_newline: bool = True  # whether a line break follows the last turn in the template
    max_length: int = 8192  # without `max_seq_len`


PLAIN = TextFormat(None, has_markers=False)
TEXT_FORMATS = {
    "llama2_tokenizer": TextFormat("inst", max_length=4096),
    "mistral_tokenizer": TextFormat("inst"),
    "llama3_tokenizer": TextFormat("llama3"),
    "gemma_tokenizer": PLAIN,
    "phi3_mini_tokenizer": TextFormat("phi3", max_length=4096),
    "phi4_tokenizer": TextFormat(None),
    "qwen2_tokenizer": TextFormat("chatml", final_newline=False),
    "qwen2_5_tokenizer": TextFormat("chatml", final_newline=False),
    "qwen3_tokenizer": TextFormat("chatml", final_newline=False),
}


def builder_name(component: str) -> str:
    """Name of a model builder without lora_ and qlora_: torchtune.models.gemma.lora_gemma_2b is gemma_2b."""
    return PREFIX.sub("", component.rpartition(".")[2])


def hub_name(component: str) -> str | None:
    """Hub name of the model of a builder; None if it is unknown."""
    name = builder_name(component)
    if name in HUB_NAMES:
        return HUB_NAMES[name]
    if match := QWEN_SIZE.fullmatch(name):
        version, size, kind = match[1].replace("_", "."), match[2].replace("_", "."), match[3] or "_base"
        is_base = kind == "_base"
        if version == "3":
            return f"Qwen/Qwen3-{size}B" + ("-Base" if is_base else "")
        return f"Qwen/Qwen{version}-{size}B" + ("" if is_base else "-Instruct")
    return None


def convert_checkpoint(keys: ForeignKeys, draft: Draft, header: Header, component: str | None) -> tuple[str, str]:
    """Model of a checkpointer section, and a comment: a directory of this machine, a Hub name, or a directory."""
    directory = keys.take("checkpoint_dir")
    kind = str(keys.take(COMPONENT, default=CHECKPOINTERS[0])).rpartition(".")[2]
    if kind not in CHECKPOINTERS:
        draft.drop(f"{keys.path}.{COMPONENT}", kind, "only checkpoints of Hugging Face are read; convert it to one")
    if kind == "FullModelMetaCheckpointer":
        note = "weights of Meta's format are not read: those of Hugging Face in the same repository are"
        draft.differs(f"{keys.path}.{COMPONENT}", kind, note)
    for name in (
        "checkpoint_files",
        "model_type",
        "output_dir",
        "safe_serialization",
        "enable_dcp",
        "recipe_checkpoint",
    ):
        if (value := keys.take(name)) is not None:
            draft.report_unneeded(keys.dotted(name), value, CHECKPOINT_FILES)
    if (limit := keys.take("keep_last_n_checkpoints")) is not None:
        draft.set("save_total_limit", limit)
    if (adapter := keys.take("adapter_checkpoint")) is not None:
        note = "an adapter is continued with adapter.adapter_path, if its directory is in PEFT's format"
        draft.drop(keys.dotted("adapter_checkpoint"), adapter, note)
    return choose_model(directory, header, component)


def choose_model(directory: str | None, header: Header, component: str | None) -> tuple[str, str]:
    """Model and a comment, from the directory of a checkpoint, the comments of the config, and the builder."""
    if directory and (Path(directory) / "config.json").is_file():
        return directory, ""
    name = hub_name(component) if component else None
    if directory and (downloaded := header.downloads.get(clean_path(directory))):
        return downloaded, f"Downloaded to {directory} there"
    if not directory and len(header.downloads) == 1:
        return next(iter(header.downloads.values())), "Downloaded there"
    by_directory = {path.rpartition("/")[2]: repo for path, repo in header.downloads.items()}
    if directory and (downloaded := by_directory.get(clean_path(directory).rpartition("/")[2])):
        return downloaded, f"Downloaded to {directory} there"
    if directory and not directory.startswith("/tmp/"):
        return directory, f"Not found on this machine{f'; on the Hub: {name}' if name else ''}"
    if name:
        variant = f"; check that this is the variant in {directory}" if directory else ""
        return name, f"By the builder {builder_name(component or '')}{variant}"
    if directory:
        return directory, "Not found on this machine"
    raise UserError(
        "checkpointer: missing checkpoint_dir, and the builder of the model is unknown. Set checkpoint_dir."
    )


def convert_adapter(model: ForeignKeys, component: str, draft: Draft) -> None:
    """LoRA, DoRA and QLoRA of a model section."""
    prefix = PREFIX.match(component.rpartition(".")[2])
    quantized = model.flag("quantize_base") or bool(prefix and prefix[1] == "qlora")
    uses_dora = model.flag("use_dora")
    names = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")
    if prefix is None and not any(name in model for name in names):
        return
    draft.set("adapter", "dora" if uses_dora else "lora")
    modules = [LORA_NAMES.get(name, name) for name in model.texts("lora_attn_modules")]
    is_all = {"q_proj", "k_proj", "v_proj", "o_proj"} <= set(modules) and model.peek("apply_lora_to_mlp")
    targets = ["mlp"] if model.flag("apply_lora_to_mlp") else []
    targets += ["lm_head"] if model.flag("apply_lora_to_output") else []
    rank = model.number("lora_rank", default=8)
    draft.set("adapter.rank", rank)
    draft.set("adapter.alpha", model.number("lora_alpha", default=16))
    if dropout := model.number("lora_dropout", default=0.0):
        draft.set("adapter.dropout", dropout)
    everything = ["all-linear", "lm_head"] if "lm_head" in targets else "all-linear"
    draft.set("adapter.target_modules", everything if is_all else [*modules, *targets])
    if quantized:
        comment = "torchtune quantizes the block scales too" if prefix and prefix[1] == "qlora" else ""
        draft.set("quantization", {"kind": "nf4", "double_quant": True}, comment)


def convert_text_format(tokenizer: ForeignKeys, draft: Draft) -> tuple[TextFormat, int, str]:
    """Format of the conversations, `max_length`, and a comment on it."""
    name = str(tokenizer.take(COMPONENT, default="")).rpartition(".")[2]
    text_format = TEXT_FORMATS.get(name, TextFormat(None))
    for key in ("path", "merges_file", "vocab_path", "merges_path", "special_tokens_path", "truncation_type",
                "tokenizer_json_path", "tokenizer_config_json_path", "generation_config_path", "max_num_tiles",
                "image_size"):  # fmt: skip
        if (value := tokenizer.take(key)) is not None:
            draft.report_unneeded(tokenizer.dotted(key), value, CHECKPOINT_FILES)
    if name == "phi3_mini_tokenizer":
        note = "a line break after <|end|> is a token there; the tokenizer of the checkpoint drops it"
        draft.differs(tokenizer.path, name, note)
    length = tokenizer.number("max_seq_len")
    comment = "" if length else "torchtune has no limit without max_seq_len; longer rows are truncated here"
    return convert_prompt_template(tokenizer, draft, name, text_format), int(length or text_format.max_length), comment


def convert_prompt_template(tokenizer: ForeignKeys, draft: Draft, name: str, text_format: TextFormat) -> TextFormat:
    """The format with another `prompt_template`. Templates with texts around a question are handled with the data."""
    if "prompt_template" not in tokenizer:
        return text_format
    template = tokenizer.peek("prompt_template")
    is_written_as_text = name in ("llama2_tokenizer", "mistral_tokenizer", "gemma_tokenizer")
    if template is None:
        tokenizer.take("prompt_template")
        return PLAIN._replace(max_length=text_format.max_length) if is_written_as_text else text_format
    by_name = {"ChatMLTemplate": "chatml", "Llama2ChatTemplate": "inst", "MistralChatTemplate": "inst"}
    if isinstance(template, str) and (known := by_name.get(template.rpartition(".")[2])):
        tokenizer.take("prompt_template")
        return text_format._replace(chat_template=known, has_markers=True, final_newline=True)
    return PLAIN._replace(max_length=text_format.max_length) if is_written_as_text else text_format
