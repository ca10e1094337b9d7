"""Import a config file or a command line of another trainer: the trainer by its keys, and the result."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.axolotl.convert import import_axolotl
from tunekit.importers.draft import Draft, to_flow
from tunekit.importers.foreign_keys import ForeignKeys, flatten, parse_mapping
from tunekit.importers.kubeflow import import_kubeflow
from tunekit.importers.launch_command import LaunchCommand, parse_command, parse_options
from tunekit.importers.leftover_keys import report_rest
from tunekit.importers.llama_factory.convert import import_llama_factory
from tunekit.importers.torchtune.convert import import_torchtune
from tunekit.importers.torchtune.source import apply_overrides, read_run
from tunekit.importers.trl.convert import LAUNCHER_OPTIONS, TASKS, import_trl, read_arguments
from tunekit.system import read_utf8

KeysOfRecipe = Callable[[str], Collection[str]]
TRAINERS = {
    "torchtune": "torchtune",
    "trl": "TRL",
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "kubeflow": "Kubeflow",
}
TRL_KEYS = {
    "model_name_or_path",
    "dataset_name",
    "datasets",
    "learning_rate",
    "per_device_train_batch_size",
}
LLAMA_FACTORY_KEYS = {"stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target", "export_dir"}
CONVERTERS: dict[str, Callable[..., tuple[Draft, ForeignKeys]]] = {
    "axolotl": lambda values, task, num_devices, path: import_axolotl(values, num_devices),
    "kubeflow": lambda values, task, num_devices, path: import_kubeflow(values, num_devices),
    "llama-factory": lambda values, task, num_devices, path: import_llama_factory(values, num_devices, path),
    "trl": lambda values, task, num_devices, path: import_trl(values, task, num_devices),
}
VALUE_ERRORS = (TypeError, ValueError, AttributeError, LookupError)
TRACKER_VARIABLES = {  # keys of variables that trackers read
    "WANDB_PROJECT": "wandb_project", "WANDB_ENTITY": "wandb_entity", "WANDB_NAME": "wandb_name",
    "WANDB_MODE": "wandb_mode", "MLFLOW_EXPERIMENT_NAME": "mlflow_experiment_name",
    "MLFLOW_TRACKING_URI": "mlflow_tracking_uri", "COMET_PROJECT_NAME": "comet_project_name",
    "COMET_WORKSPACE": "comet_workspace",
}  # fmt: skip
VARIABLE = "not needed: an environment variable; set it for tune run too, if it is not one of the launcher"
LAUNCHED = "not needed: tune run --nproc-per-node N starts the processes, which shard the model with FSDP2"


@dataclass(frozen=True)
class Imported:
    """A config of tunekit, and the trainer and the file or command that it is from."""

    draft: Draft
    trainer: str
    origin: str

    @property
    def text(self) -> str:
        return self.draft.format(f"Imported from {self.origin} ({TRAINERS[self.trainer]})")


def find_trainer(config: dict[str, Any]) -> str | None:
    """Trainer of a config, by its keys; None for a config of tunekit, and if no key says it."""
    if has_component(config):
        return "torchtune"
    if config.get("kind") == "TrainJob":
        return "kubeflow"
    if "base_model" in config:
        return "axolotl"
    if "model" in config or "recipe" in config:
        return None
    if LLAMA_FACTORY_KEYS & config.keys():
        return "llama-factory"
    return "trl" if TRL_KEYS & config.keys() else None


def detect_trainer(config: dict[str, Any], name: str) -> str:
    """Trainer of a config. Raise UserError if no key says it."""
    if (trainer := find_trainer(config)) is not None:
        return trainer
    if "recipe" in config and "model" in config:
        raise UserError(f"{name}: is a config of tunekit. Run it with: tune run {name}")
    raise UserError(f"{name}: not recognized as a config of another trainer. Pass --from {' or '.join(TRAINERS)}.")


def import_hint(path: Path) -> str | None:
    """How to import a config of another trainer; None if it is not one."""
    try:
        trainer = find_trainer(parse_mapping(read_utf8(path), str(path)))
    except (UserError, OSError):
        return None
    if trainer is None:
        return None
    return (
        f"{path}: is a config of {TRAINERS[trainer]}. Write one of tunekit with: tune import {path} --output ours.yaml"
    )


def has_component(value: Any) -> bool:
    """Whether a config contains the key `_component_` of torchtune."""
    if isinstance(value, dict):
        return "_component_" in value or any(map(has_component, value.values()))
    return isinstance(value, list) and any(map(has_component, value))


def import_file(
    path: Path, overrides: Sequence[str], trainer: str | None, num_devices: int | None, keys_of_recipe: KeysOfRecipe
) -> Imported:
    """Import a config file, with overrides in the syntax of its trainer."""
    text = read_utf8(path)
    values = parse_mapping(text, str(path))
    trainer = trainer or detect_trainer(values, str(path))
    if trainer == "torchtune":
        draft, keys = convert_torchtune(text, str(path), overrides, None, num_devices)
    else:
        apply_overrides(values, overrides)
        draft, keys = convert(trainer, values, None, num_devices, path)
    return finish(draft, keys, trainer, str(path), keys_of_recipe)


def convert(
    trainer: str, values: dict[str, Any], task: str | None, num_devices: int | None, path: Path | None
) -> tuple[Draft, ForeignKeys]:
    """Convert the keys of a trainer. `path` is the file that they are from."""
    try:
        return CONVERTERS[trainer](values, task, num_devices, path)
    except VALUE_ERRORS as error:  # of a value with another type than its trainer documents
        where = path or TRAINERS[trainer]
        raise UserError(
            f"{where}: a value has an unexpected type ({error}). Check the config with its trainer."
        ) from error


def convert_torchtune(
    text: str, name: str, overrides: Sequence[str], recipe: str | None, num_devices: int | None
) -> tuple[Draft, ForeignKeys]:
    """Convert the text of a config of torchtune. `name` is its file, for messages."""
    try:
        return import_torchtune(text, name, overrides, recipe, num_devices)
    except VALUE_ERRORS as error:
        raise UserError(f"{name}: a value has an unexpected type ({error}). Correct it.") from error


def finish(draft: Draft, keys: ForeignKeys, trainer: str, origin: str, keys_of_recipe: KeysOfRecipe) -> Imported:
    """Report the keys that were not read."""
    report_rest(keys, draft, keys_of_recipe(draft.recipe))
    return Imported(draft, trainer, origin)


def import_command(words: Sequence[str], num_devices: int | None, keys_of_recipe: KeysOfRecipe) -> Imported:
    """Import a command line of one of the trainers."""
    command = parse_command(words)
    program = command.program
    if program == "tune":
        return import_torchtune_command(command, num_devices, keys_of_recipe)
    if program.startswith("axolotl"):
        return import_file_command("axolotl", command, num_devices, keys_of_recipe)
    if program.startswith("llamafactory") or program in ("src/train.py", "lmf"):
        return import_file_command("llama-factory", command, num_devices, keys_of_recipe)
    return import_trl_command(command, num_devices, keys_of_recipe)


def import_file_command(
    trainer: str, command: LaunchCommand, num_devices: int | None, keys_of_recipe: KeysOfRecipe
) -> Imported:
    """Import `PROGRAM [train] FILE [key=value ...] [--key value ...]`."""
    words = command.arguments[1:] if command.arguments[:1] and "." not in command.arguments[0] else command.arguments
    task = command.arguments[0] if command.arguments else ""
    if words is not command.arguments and task not in ("train", "preprocess"):
        raise UserError(f"{command.program} {task}: only the command train can be imported.")
    path = Path(words[0]) if words and not words[0].startswith("-") else None
    rest = words[1:] if path is not None else words
    values = read_values(path)
    apply_overrides(values, [word for word in rest if "=" in word and not word.startswith("-")])
    options = parse_options([word for word in rest if "=" not in word or word.startswith("-")])
    options = {name.removeprefix("--"): value for name, value in options.items()}
    launcher = {name.removeprefix("--"): value for name, value in command.launcher_options.items()}
    launcher |= {name: options.pop(name) for name in (*LAUNCHER_OPTIONS, "launcher", "cloud") if name in options}
    values |= {name.removeprefix("no_"): False if name.startswith("no_") else value for name, value in options.items()}
    variables = read_variables(command.environment, values)
    draft, keys = convert(trainer, values, None, num_devices or command.num_devices, path)
    report_variables(variables, draft)
    for name, value in launcher.items():
        draft.report_unneeded(name, value, LAUNCHED)
    return finish(draft, keys, trainer, shorten([command.program, *command.arguments]), keys_of_recipe)


def read_values(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    if not path.is_file():
        raise UserError(f"{path}: no such file. Pass the config of the command")
    return parse_mapping(read_utf8(path), str(path))


def import_trl_command(command: LaunchCommand, num_devices: int | None, keys_of_recipe: KeysOfRecipe) -> Imported:
    """Import `trl TASK ...`, or a script with the arguments of TRL: its name says the trainer."""
    words, program = command.arguments, Path(command.program).name.removesuffix(".py").rpartition(".")[2]
    task = words[0] if program == "trl" and words else program
    if "vlm" in task:
        raise UserError(f"{command.program}: trains on images, and models read text only here.")
    values, launcher = read_arguments(words[1:] if program == "trl" else words)
    launcher = {name.removeprefix("--"): value for name, value in command.launcher_options.items()} | launcher
    count = launcher.get("num_processes")
    devices = num_devices or command.num_devices or (count if isinstance(count, int) else None)
    known = task if task in TASKS or program == "trl" else next((name for name in TASKS if task.startswith(name)), None)
    if known is None and not TRL_KEYS & values.keys():
        raise UserError(f"{command.program}: not the program of a trainer that can be imported.")
    variables = read_variables(command.environment, values)
    draft, keys = convert("trl", values, known, devices, None)
    report_variables(variables, draft)
    for name, value in launcher.items():
        draft.report_unneeded(name, value, LAUNCHED)
    return finish(draft, keys, "trl", shorten([command.program, *command.arguments]), keys_of_recipe)


def read_variables(environment: Mapping[str, str], values: dict[str, Any]) -> list[str]:
    """Add the keys of variables of trackers that a config uses, in place. Returns the other variables."""
    trackers = f"{values.get('report_to')} {'wandb' if values.get('use_wandb') or values.get('wandb_project') else ''}"
    others = []
    for name, value in environment.items():
        if name in TRACKER_VARIABLES and (name.partition("_")[0].lower() in trackers or "all" in trackers.split()):
            values.setdefault(TRACKER_VARIABLES[name], value)
        else:
            others.append(name)
    return others


def report_variables(names: Sequence[str], draft: Draft) -> None:
    """Report variables without their values, which may be tokens."""
    for name in names:
        draft.report_unneeded(name, "", VARIABLE)


def shorten(words: Sequence[str]) -> str:
    """A command for a comment."""
    text = " ".join(" ".join(words).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def import_torchtune_command(command: LaunchCommand, num_devices: int | None, keys_of_recipe: KeysOfRecipe) -> Imported:
    """Import `tune run [options] RECIPE --config FILE [overrides]`."""
    words = command.arguments
    if words[:1] != ["run"] or "--config" not in words[:-1]:
        raise UserError("expected tune run RECIPE --config FILE [key=value ...]")
    place = words.index("--config")
    recipe, devices = read_run(" ".join([*words[1:place], "--config"]))
    name, overrides = words[place + 1], words[place + 2 :]
    result = import_torchtune_run(name, overrides, recipe, num_devices or devices, keys_of_recipe)
    report_variables([*command.environment], result.draft)
    return result


def import_torchtune_run(
    name: str, overrides: Sequence[str], recipe: str | None, num_devices: int | None, keys_of_recipe: KeysOfRecipe
) -> Imported:
    """Import a config for a recipe of torchtune."""
    path = Path(name)
    if not path.is_file():
        hint = f"Write it to a file with torchtune (`tune cp {name} my.yaml`), or see tune run {recipe} --config {name}"
        raise UserError(f"{name}: no such file. {hint}")
    draft, keys = convert_torchtune(read_utf8(path), name, overrides, recipe, num_devices)
    return finish(draft, keys, "torchtune", name, keys_of_recipe)


def translate_torchtune_overrides(overrides: Sequence[str], keys_of_recipe: KeysOfRecipe) -> tuple[list[str], Draft]:
    """Overrides of a config of torchtune's package as overrides of one of tunekit, and a draft with their findings.

    They are what changes in the import of a typical config. The batch size is that of a LoRA config: 2 x 8 rows.
    """
    drafts = []
    for words in ((), overrides):
        draft, keys = convert_torchtune(TYPICAL_CONFIG, "overrides", words, "lora_finetune_single_device", None)
        finish(draft, keys, "torchtune", "torchtune", keys_of_recipe)
        drafts.append(draft)
    before, after = (dict(flatten("", draft.tree)) for draft in drafts)
    words = [f"{key[1:]}={to_flow(value)}" for key, value in after.items() if before.get(key, MISSING) != value]
    findings = [finding for finding in drafts[1].findings if finding not in drafts[0].findings]
    return words, Draft(findings=findings)


MISSING = object()
TYPICAL_CONFIG = """
output_dir: /tmp/torchtune
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj, v_proj], lora_rank: 8}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/model}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: false}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: false}
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger}
batch_size: 2
gradient_accumulation_steps: 8
epochs: 1
max_steps_per_epoch: null
clip_grad_norm: null
seed: null
compile: false
shuffle: true
enable_activation_checkpointing: true
enable_activation_offloading: false
log_every_n_steps: 1
device: cuda
dtype: bf16
"""
