"""A torchtune config as a config of tunekit."""

from collections.abc import Sequence
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys, parse_mapping
from tunekit.importers.torchtune import recipes
from tunekit.importers.torchtune.data import IMAGES, DataContext, convert_dataset, read_question_texts
from tunekit.importers.torchtune.model import CHECKPOINT_FILES, convert_adapter, convert_checkpoint, convert_text_format
from tunekit.importers.torchtune.source import COMPONENT, apply_overrides, read_header, resolve
from tunekit.importers.torchtune.training import convert_precision, convert_training, convert_unneeded

MODEL_SIZES = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len", "attn_dropout",
               "norm_eps", "intermediate_dim", "image_size", "num_classes", "tie_word_embeddings", "rope_base",
               "base_model_path", "head_dim", "scale_factor", "encoder_trainable", "fusion_trainable",
               "decoder_trainable")  # fmt: skip


def import_torchtune(
    text: str, name: str, overrides: Sequence[str] = (), recipe: str | None = None, num_devices: int | None = None
) -> tuple[Draft, ForeignKeys]:
    """Convert the text of a config. `recipe` and `num_devices` are those of a command, else of its comments.

    Returns the draft, and the keys that were not read.
    """
    config = parse_mapping(text, name)
    header = read_header(text)
    apply_overrides(config, overrides)
    unresolved = resolve(config)
    draft = Draft(recipes.find_recipe(config, recipe or header.recipe))
    for reference in unresolved:
        draft.drop("interpolation", reference, "the key that it names does not exist")
    keys = ForeignKeys(config)
    is_distributed = "distributed" in (recipe or header.recipe or "")
    devices = num_devices or (header.num_devices if is_distributed else None) or 1
    component = convert_model(keys, draft, header)
    check_images(component, config)
    convert_text(keys, draft, devices, header)
    return draft, keys


def check_images(component: str, config: dict[str, Any]) -> None:
    """Raise UserError for rows with images, before anything else is converted."""
    if "tiled_images" in str(config.get("collate_fn", "")) or "multimodal" in str(config.get("datasets", "")):
        raise UserError(f"dataset: {component.rpartition('.')[2]} {IMAGES}. Set a dataset of texts.")


def convert_model(keys: ForeignKeys, draft: Draft, header: Any) -> str:
    """Model, adapter and quantization. Returns the builder of the model."""
    section = "policy_model" if "policy_model" in keys else "model"
    model = keys.section(section)
    component = str(model.take(COMPONENT, default=""))
    base = keys.take("base_model_path")
    checkpointer = keys.section("checkpointer")
    if "checkpoint_dir" not in checkpointer and base is not None:
        checkpointer.values["checkpoint_dir"] = base
    name, comment = convert_checkpoint(checkpointer, draft, header, component)
    draft.set("model", name, comment)
    convert_adapter(model, component, draft)
    if draft.recipe in ("evaluate", "generate") and draft.tree.pop("adapter", None) is not None:
        draft.differs(section, component, "the model is read without an adapter; set model to the directory of a run")
    for size in MODEL_SIZES:
        if size in model:
            draft.report_unneeded(model.dotted(size), model.take(size), CHECKPOINT_FILES)
    return component


def convert_text(keys: ForeignKeys, draft: Draft, devices: int, header: Any) -> None:
    """Everything but the model, by recipe."""
    tokenizer = keys.section("tokenizer")
    text_format, length, comment = convert_text_format(tokenizer, draft)
    if draft.recipe in ("evaluate", "generate"):
        convert_inference(keys, draft, text_format.has_markers)
        tokenizer.take("prompt_template")
        return
    if draft.recipe == "grpo":
        recipes.convert_grpo(keys, draft, devices)
    if draft.recipe == "ppo":
        recipes.convert_ppo(keys, draft, header)
    if draft.recipe in ("grpo", "ppo"):
        recipes.convert_prompt_data(keys.take("dataset"), draft, length, text_format.chat_template)
        if not keys.flag("shuffle", default=True):
            draft.set("data.shuffle", False)
    else:
        context = DataContext(draft, text_format, length, tokenizer)
        read_question_texts(context)
        convert_rows(keys, draft, context, comment)
    if draft.recipe == "preference":
        recipes.convert_preference_loss(keys, draft, header)
    elif draft.recipe == "distill":
        recipes.convert_distillation(keys, draft, header)
    elif draft.recipe == "sft":
        recipes.convert_cross_entropy(keys, draft)
    convert_training(keys, draft, devices)


def convert_rows(keys: ForeignKeys, draft: Draft, context: DataContext, comment: str) -> None:
    """Rows of training and evaluation."""
    data = convert_dataset(keys.take("dataset"), "dataset", context)
    if not keys.flag("shuffle", default=True):
        data["shuffle"] = False
    draft.set("data", data)
    if comment and "max_length" in data:
        draft.comments["data.max_length"] = comment
    every, rows = keys.number("run_val_every_n_steps"), keys.take("dataset_val")
    size = keys.take("batch_size_val")
    if rows is not None and every is not None:
        draft.set("eval_data", convert_dataset(rows, "dataset_val", context))
        draft.set("eval_every", int(every))
    elif rows is not None:
        draft.report_unneeded("dataset_val", "", "not needed: the model is not evaluated without run_val_every_n_steps")
    if size is not None:
        draft.report_unneeded("batch_size_val", size, "not needed: micro_batch_size, also of evaluation")


def convert_inference(keys: ForeignKeys, draft: Draft, has_markers: bool) -> None:
    """Evaluation and generation."""
    if draft.recipe == "evaluate":
        recipes.convert_evaluation(keys, draft)
    else:
        recipes.convert_generation(keys, draft, has_markers)
    convert_precision(keys, draft, masters=False)
    if isinstance(keys.peek("quantizer"), dict):
        draft.drop("quantizer", "", "weights of torchao are not read; set quantization=nf4 or float8")
        keys.take("quantizer")
    if (directory := keys.take("output_dir")) is not None:
        draft.report_unneeded(
            "output_dir", directory, "not needed: results are printed; output_path writes them to a file"
        )
    convert_unneeded(keys, draft)
