"""A TrainJob of Kubeflow with the builtin trainer of torchtune: its arguments are overrides of a torchtune config."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tunekit.errors import UserError
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.torchtune.convert import import_torchtune

RUNTIME = re.compile(r"torchtune-(?P<family>llama|qwen|gemma|mistral|phi)(?P<version>[\d.]*)-(?P<size>[\d.]+)b.*")
WORKSPACE = "/workspace/"  # of the pods, where initializers write the model and the rows
MODEL_DIR = "/workspace/model"
CLUSTER = "not needed: an option of the cluster; run the config with a job as in docs/clusters.md"


def import_kubeflow(job: Tree, num_devices: int | None = None) -> tuple[Draft, ForeignKeys]:
    """Convert a TrainJob. Raise UserError if its trainer is not torchtune."""
    spec = ForeignKeys(job.get("spec") or {}, "spec")
    runtime = spec.section("runtimeRef")
    name = str(runtime.take("name", default=""))
    trainer = spec.section("trainer")
    arguments = [str(word) for word in (trainer.take("args") or [])]
    match = RUNTIME.fullmatch(name)
    if match is None:
        hint = "Pass its command: tune import -- COMMAND"
        raise UserError(f"spec.runtimeRef.name: {name!r} has no builtin trainer of torchtune. {hint}.")
    initializer = spec.section("initializer")
    model, rows = initializer.section("model"), initializer.section("dataset")
    source, (uri, other) = read_rows_uri(rows.take("storageUri")), read_model_uri(model.take("storageUri"))
    config, header = make_config(match, arguments, source, uri)
    overrides = [word for word in arguments if "=" in word and WORKSPACE not in word and word not in SOURCES]
    nodes, processes = trainer.number("numNodes", default=1), trainer.take("numProcPerNode")
    per_node = processes if isinstance(processes, int) else count_gpus(trainer.section("resourcesPerNode"))
    devices = num_devices or int(nodes) * per_node
    text = header + yaml.safe_dump(config)
    draft, keys = import_torchtune(text, "spec.trainer.args", overrides, None, devices)
    draft.comments["model"] = f"Of {name}" if uri is None else f"Of {model.path}"
    for key, address in ((rows.dotted("storageUri"), source), (model.dotted("storageUri"), other)):
        if address is not None and "://" in address and not address.startswith("hf://"):
            name = "data.source" if key.startswith(rows.path) else "model"
            draft.drop(key, address, f"only the Hugging Face Hub and local files are read: set {name} to a directory")
    report(draft, spec, arguments)
    return draft, keys


SOURCES = ("dataset.source=parquet", "dataset.source=json", "dataset.source=csv")


def read_rows_uri(uri: Any) -> str | None:
    """Source of rows: a name on the Hub, a directory there, or another address."""
    if uri is None or not str(uri).startswith("hf://"):
        return None if uri is None else str(uri)
    owner_and_name, directory = split_hub_uri(str(uri))
    return f"hf://datasets/{owner_and_name}/{directory}" if directory else owner_and_name


def read_model_uri(uri: Any) -> tuple[str | None, str | None]:
    """Name of a model on the Hub, and another address; None for what the URI is not."""
    if uri is None or not str(uri).startswith("hf://"):
        return None, None if uri is None else str(uri)
    return split_hub_uri(str(uri))[0], None


def split_hub_uri(uri: str) -> tuple[str, str]:
    """Repository and directory of hf://owner/name/directory."""
    parts = uri.removeprefix("hf://").strip("/").split("/")
    return "/".join(parts[:2]), "/".join(parts[2:])


def make_config(match: re.Match[str], arguments: list[str], source: str | None, model: str | None) -> tuple[Tree, str]:
    """The torchtune config that the runtime has, and a header that names the model."""
    version, size = match["version"].replace(".", "_"), match["size"].replace(".", "_")
    family = f"{match['family']}{version}"
    is_adapted = any(
        word.startswith(("model.lora", "model.apply_lora", "model.quantize", "model.use_dora")) for word in arguments
    )
    builder = f"{family}_{size}b" + ("_instruct" if match["family"] == "qwen" else "")
    tokenizer = {"llama": "llama3.llama3_tokenizer", "qwen": "qwen2_5.qwen2_5_tokenizer"}.get(
        match["family"], f"{family}.{family}_tokenizer"
    )
    config: Tree = {
        "output_dir": "runs/kubeflow",
        "model": {"_component_": f"torchtune.models.{family}.{'lora_' if is_adapted else ''}{builder}"},
        "tokenizer": {"_component_": f"torchtune.models.{tokenizer}"},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer"},
        "dataset": {"_component_": "torchtune.datasets.instruct_dataset", "source": source or "data"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4 if is_adapted else 2e-5},
        "batch_size": 4,
        "epochs": 1,
        "dtype": "bf16",
    }
    if is_adapted:
        config["model"] |= {"lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}
        config["model"] |= {"lora_rank": 64, "lora_alpha": 128}
        config["gradient_accumulation_steps"] = 8
    if source is None or "alpaca" in source:
        config["dataset"] = {"_component_": "torchtune.datasets.alpaca_dataset"} | (
            {"source": source} if source else {}
        )
    if model is None:
        return config, ""
    config["checkpointer"]["checkpoint_dir"] = MODEL_DIR
    return config, f"# tune download {model} --output-dir {MODEL_DIR}\n"


def count_gpus(resources: ForeignKeys) -> int:
    """GPUs of a node, by its resources; 1 without any."""
    counts = [1]
    for group in ("requests", "limits"):
        values = resources.take(group)
        counts += [int(value) for name, value in (values or {}).items() if str(name).endswith("/gpu")]
    for name in [*resources.values]:
        value = resources.take(name)
        counts += [int(value)] if str(name).endswith(("/gpu", "gpu")) else []
    return max(counts)


def report(draft: Draft, spec: ForeignKeys, arguments: list[str]) -> None:
    """Report what is special to the cluster."""
    for word in arguments:
        if "=" not in word:
            draft.drop("spec.trainer.args", word, "expected key=value")
        elif WORKSPACE in word or word in SOURCES:
            draft.report_unneeded(
                "spec.trainer.args", word, "not needed: a path in the pod; the source is that of the initializer"
            )
    for dotted, value in spec.rest():
        if dotted == "spec.trainer.command":
            draft.drop(dotted, value, "a command replaces the builtin trainer: pass it to tune import -- COMMAND")
        else:
            draft.report_unneeded(dotted, "" if isinstance(value, Mapping | list) else value, CLUSTER)
