"""Small random checkpoints in the format of transformers: odd shapes, and weights that reveal errors."""

import copy
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import nn

from tests.helpers.delta_net_shapes import DELTA
from tests.helpers.dense_shapes import DENSE
from tests.helpers.moe_shapes import EXPERTS
from tunekit import build as assemble
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import CheckpointDir, HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.tokenizer_classes import FORCED
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import Shape
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NoQuantization

# Keep the output of the comparison readable.
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the threads of transformers take longer than reading a small file

FULL, DEFAULT_MEMORY = NoAdapter(), MemoryConfig()
FP32 = PrecisionConfig("fp32", "fp32", "fp32")
VOCAB_SIZE = 67
SPECIAL_TOKENS = ("<s>", "</s>", "<user>", "<assistant>")
VOCABULARY = (*SPECIAL_TOKENS, *(f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL_TOKENS))))
TEMPLATE = """{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' </s> ' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"""

SHAPES: dict[str, dict[str, Any]] = DENSE | EXPERTS | DELTA
FIRST_SHAPES = {shape["model_type"]: name for name, shape in reversed(SHAPES.items())}  # by family
# Shapes of a family that differ only in these have the same weights.
WEIGHTLESS_OPTIONS = {"rope_parameters", "rms_norm_eps", "hidden_act", "sliding_window"}


@functools.cache
def shallow_shape(name: str) -> dict[str, Any]:
    """One of the SHAPES with the first two layers, or more if later ones have other weights. Unchanged if the layers of
    a shorter model would be different ones.
    """
    shape = SHAPES[name]
    text, spec = shape.get("text_config", shape), find_family(shape, name)[1]
    weights = [[*layer_weights(spec, i)] for i in range(len(spec.layers))]
    count = next(n for n in range(2, len(weights) + 1) if all(other in weights[:n] for other in weights[n:]))
    options = {"num_hidden_layers": count, "layer_types": (text.get("layer_types") or [])[:count]}
    text = text | {key: value for key, value in options.items() if text.get(key)}
    shorter = shape | {"text_config": text} if "text_config" in shape else text
    try:
        return shorter if find_family(shorter, name)[1].layers == spec.layers[:count] else shape
    except UserError:
        return shape


@functools.cache
def model_shapes(spec: DecoderSpec) -> Mapping[str, Shape]:
    """Shapes of all parameters of a model."""
    return CheckpointDir(Path()).model_shapes(spec)


def layer_weights(spec: DecoderSpec, index: int) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the weights of a layer."""
    prefix = f"layers.{index}."
    return ((key.removeprefix(prefix), size) for key, size in model_shapes(spec).items() if key.startswith(prefix))


def auto_class(config: Mapping[str, Any]) -> Any:
    """transformers class that loads the checkpoint: multimodal if the text model is nested in a larger config."""
    return transformers.AutoModelForImageTextToText if "text_config" in config else transformers.AutoModelForCausalLM


def build(shape: Mapping[str, Any], seed: int = 0) -> transformers.PreTrainedModel:
    """Random transformers model with eager attention. Norms, biases and weights are far from their default initial
    values.
    """
    torch.manual_seed(seed)
    options = {key: value for key, value in shape.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(shape["model_type"], **options)
    model = auto_class(shape).from_config(config, attn_implementation="eager").float()
    # untrained values that are saved
    buffers = [buffer for name, buffer in model.named_buffers() if name in model.state_dict()]
    with torch.no_grad():
        for b in buffers:
            b.uniform_(0.5, 1.5)
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif p.ndim == 1:
                p.normal_(std=0.3)
            elif "embed" in name:
                p.normal_()
            else:
                p.normal_(std=1.5 * p.shape[1] ** -0.5)
    return model.eval()


def save(model: nn.Module, folder: Path, config_version: int = 5, **options: Any) -> Path:
    """Checkpoint directory with a tokenizer. `config_version`: write config.json as transformers 5 or 4 does."""
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)  # sampling options are not part of the model
    rewrite_config(folder, lambda c: c if config_version == 5 else to_transformers4_config(c))
    write_tokenizer(folder)
    return folder


def rewrite_config(folder: Path, change: Any) -> None:
    """Replace the contents of config.json by `change(contents)`."""
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text())), indent=2))


# Keys that had another name in transformers 4, by family.
TRANSFORMERS4_KEYS = {
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gemma3_text": {"_sliding_window_pattern": "sliding_window_pattern"},
}
# Families whose layer types follow from other keys in transformers 4.
FAMILIES_WITHOUT_LAYER_TYPES = {
    "gemma2",
    "gemma3_text",
    "llama4_text",
    "olmo3",
    "qwen2",
    "qwen3",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
}


def to_transformers4_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 would have written it; unchanged if transformers 4 does not support the family."""
    if inner := config.get("text_config"):
        return config | {"text_config": to_transformers4_config(inner)}
    kind = config["model_type"]
    if kind.startswith(("gemma4", "qwen3_5")):
        return config
    new_keys = {"dtype": "torch_dtype"} | TRANSFORMERS4_KEYS.get(kind, {})
    old = {new_keys.get(key, key): value for key, value in config.items()}
    if kind in FAMILIES_WITHOUT_LAYER_TYPES and has_default_layer_types(config):
        del old["layer_types"]
    if "rope_parameters" in config:
        old |= to_transformers4_rope(old.pop("rope_parameters") or {})
    return old | {"transformers_version": "4.40.0"}


def has_default_layer_types(config: dict[str, Any]) -> bool:
    """Whether the layers have the types that transformers assigns if `layer_types` is not set."""
    options = {key: value for key, value in config.items() if key != "layer_types"}
    return transformers.AutoConfig.for_model(**options).layer_types == config["layer_types"]


def to_transformers4_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE options as top-level keys. With two kinds of layers, scaling applied to the full-attention layers."""
    if rope.keys() == {"full_attention", "sliding_attention"}:
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        scaling = {key: value for key, value in full.items() if key != "rope_theta"}
        local_base = {"rope_local_base_freq": sliding["rope_theta"]}
        return local_base | {"rope_theta": full["rope_theta"], "rope_scaling": scaling if len(scaling) > 1 else None}
    if "rope_theta" not in rope:
        return {"rope_parameters": rope}
    theta, kind = rope["rope_theta"], rope["rope_type"]
    partial = {key: value for key, value in rope.items() if key == "partial_rotary_factor"}
    scaling_options = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type", *partial)}
    kind_key = "type" if kind in ("linear", "longrope") else "rope_type"
    return partial | {
        "rope_theta": theta,
        "rope_scaling": scaling_options | {kind_key: kind} if scaling_options else None,
    }


def write_tokenizer(folder: Path) -> None:
    """Word-level tokenizer: `w7` is token 11."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {"bos_token": "<s>", "eos_token": "</s>"}
    if read_model_type(folder) in FORCED:  # transformers replaces their class, unless it has code of its own
        config["auto_map"] = {"AutoTokenizer": [None, None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def read_model_type(folder: Path) -> str | None:
    file = folder / "config.json"
    return json.loads(file.read_text())["model_type"] if file.is_file() else None


# Files of checkpoints, and the state of torch's generator after their creation.
CHECKPOINTS: dict[tuple[str, int, int], tuple[dict[str, bytes], torch.Tensor]] = {}


def make_checkpoint(folder: Path, name: str, config_version: int = 5, seed: int = 0) -> Path:
    """Checkpoint with one of the SHAPES. A process builds each once."""
    key = repr(SHAPES[name]), config_version, seed
    if key not in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as path:
            files = save(build(SHAPES[name], seed), Path(path), config_version).iterdir()
            CHECKPOINTS[key] = {file.name: file.read_bytes() for file in files}, torch.get_rng_state()
    contents, rng_state = CHECKPOINTS[key]
    torch.set_rng_state(rng_state)
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in contents.items():
        (folder / file).write_bytes(data)
    return folder


def load_transformers_model(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint, loaded by transformers."""
    config = json.loads((folder / "config.json").read_text())
    # Configs of Gemma 1 say gelu and mean its tanh approximation. transformers 5.17 uses exact gelu.
    is_legacy = (config["model_type"], config.get("hidden_act")) == ("gemma", "gelu")
    overrides = {"hidden_act": "gelu_pytorch_tanh"} if is_legacy else {}
    return (
        auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **overrides).eval()
    )


def load_model(
    folder: Path,
    adapter: NoAdapter | LoRAConfig = FULL,
    precision: PrecisionConfig = FP32,
    memory: MemoryConfig = DEFAULT_MEMORY,
    seed: int = 0,
    compile: bool = False,
) -> Decoder:
    """The checkpoint, loaded by tunekit."""
    dist = DistributedContext(seed, "cpu")
    return assemble.build_model(
        HFCheckpoint.open(folder), NoQuantization(), adapter, precision, memory, dist, compile=compile
    )


def load_inference_model(folder: Path) -> Decoder:
    """Checkpoint, or adapter with its base model, loaded for inference in fp32."""
    return assemble.load_for_inference(str(folder), FP32, DistributedContext(0, "cpu"))[0]


def random_tokens(rows: int = 2, length: int = 23, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def make_batch(tokens: torch.Tensor) -> Batch:
    """Batch in which every second token is a target token."""
    targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    targets[:, ::2] = IGNORE
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(tokens, targets, positions, None, int((targets != IGNORE).sum()), tokens.numel())


def train(model: Decoder, adapter: NoAdapter | LoRAConfig, steps: int = 3) -> None:
    """Fine-tune for some steps with a large learning rate."""
    optimizer = AdamWConfig(lr=0.01).build(adapter.param_groups(model))
    for step in range(steps):
        batch = make_batch(random_tokens(seed=10 + step))
        (CrossEntropy()(model, batch) / batch.num_target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Maximum absolute difference, relative to the maximum absolute value of `expected`."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def gradients(model: Decoder, source: HFCheckpoint) -> dict[str, torch.Tensor]:
    """Gradients of the trained weights by their Hub names, in the layout of the checkpoint."""
    from_us = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    moves = [move for move in source.key_mappings if move.ours[0] in from_us]
    return {hub: g for m in moves for hub, g in zip(m.hub, m.op.save([from_us[n] for n in m.ours]), strict=True)}


def transformers_gradients(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients of a transformers model by the names under which it saves its weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for copy_parameter, p in zip(twin.parameters(), model.parameters(), strict=True):
            copy_parameter.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        twin.save_pretrained(folder)
        return {name: grad.clone() for name, grad in load_file(Path(folder) / "model.safetensors").items()}


def shuffle_adapter(model: nn.Module, seed: int = 2) -> None:
    """Replace the tensors of an adapter by random values; magnitudes change by at most 30%."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search(r"lora_(embedding_)?[AB]", name):
                p.normal_(std=0.3)
            elif "magnitude" in name:
                p.mul_(torch.empty_like(p).uniform_(0.7, 1.3))
