"""Small random checkpoints, made by transformers and read by us: odd shapes, and weights that show errors."""

import copy
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import nn

from tests.shapes_delta import DELTA
from tests.shapes_dense import DENSE
from tests.shapes_experts import EXPERTS
from tunekit import build as assemble
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.distributed.context import DistributedContext
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NoQuantization

# The table of all families is to be read, and not the bars of what it is compared with.
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

FULL, PLAINLY = NoAdapter(), MemoryConfig()
FP32 = PrecisionConfig("fp32", "fp32", "fp32")
VOCAB = 67
MARKS = ("<s>", "</s>", "<user>", "<assistant>")
WORDS = (*MARKS, *(f"w{i}" for i in range(VOCAB - len(MARKS))))
TEMPLATE = """{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' </s> ' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"""

SHAPES: dict[str, dict[str, Any]] = DENSE | EXPERTS | DELTA


def auto(config: Mapping[str, Any]) -> Any:
    """The class of transformers that reads a checkpoint: one whose text model is a part of a larger one, or not."""
    return transformers.AutoModelForImageTextToText if "text_config" in config else transformers.AutoModelForCausalLM


def build(shape: Mapping[str, Any], seed: int = 0) -> transformers.PreTrainedModel:
    """A model of transformers with eager attention; norms, biases and weights are far from what a fresh model has."""
    torch.manual_seed(seed)
    plain = {key: value for key, value in shape.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(shape["model_type"], **plain)
    model = auto(shape).from_config(config, attn_implementation="eager").float()
    stored = [b for name, b in model.named_buffers() if name in model.state_dict()]  # numbers that nobody trains
    with torch.no_grad():
        for b in stored:
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


def save(model: nn.Module, folder: Path, spelling: int = 5, **options: Any) -> Path:
    """A checkpoint folder with a tokenizer, and config.json as transformers 5 or 4 writes it."""
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)  # what sampling it asks for is no part of the model
    rewrite(folder, lambda c: c if spelling == 5 else older(c))
    write_tokenizer(folder)
    return folder


def rewrite(folder: Path, change: Any) -> None:
    """Replace config.json by what `change` makes of it."""
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text())), indent=2))


# What transformers 4 called it, where that is not the same in all families.
OLDER = {
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gemma3_text": {"_sliding_window_pattern": "sliding_window_pattern"},
}
# Families whose layer types follow from other keys, which was all that transformers 4 knew.
PATTERNS = {"gemma2", "gemma3_text", "llama4_text", "olmo3", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"}


def older(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json in the words of transformers 4, if it knew the family."""
    if inner := config.get("text_config"):
        return config | {"text_config": older(inner)}
    kind = config["model_type"]
    if kind.startswith(("gemma4", "qwen3_5")):
        return config
    words = {"dtype": "torch_dtype"} | OLDER.get(kind, {})
    old = {words.get(key, key): value for key, value in config.items()}
    if kind in PATTERNS and usual(config):
        del old["layer_types"]
    if "rope_parameters" in config:
        old |= older_rope(old.pop("rope_parameters") or {})
    return old | {"transformers_version": "4.40.0"}


def usual(config: dict[str, Any]) -> bool:
    """Whether the layers are of the types that they have where `layer_types` says nothing."""
    plain = {key: value for key, value in config.items() if key != "layer_types"}
    return transformers.AutoConfig.for_model(**plain).layer_types == config["layer_types"]


def older_rope(p: dict[str, Any]) -> dict[str, Any]:
    """Rotation beside other keys. Of two rotations, the scaling was that of the layers that see all."""
    if p.keys() == {"full_attention", "sliding_attention"}:
        far, near = p["full_attention"], p["sliding_attention"]
        scaled = {key: value for key, value in far.items() if key != "rope_theta"}
        local = {"rope_local_base_freq": near["rope_theta"]}
        return local | {"rope_theta": far["rope_theta"], "rope_scaling": scaled if len(scaled) > 1 else None}
    if "rope_theta" not in p:
        return {"rope_parameters": p}
    theta, kind = p["rope_theta"], p["rope_type"]
    part = {key: value for key, value in p.items() if key == "partial_rotary_factor"}
    rest = {key: value for key, value in p.items() if key not in ("rope_theta", "rope_type", *part)}
    word = "type" if kind in ("linear", "longrope") else "rope_type"
    return part | {"rope_theta": theta, "rope_scaling": rest | {word: kind} if rest else None}


def write_tokenizer(folder: Path) -> None:
    """Words are tokens: `w7` is token 11."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def made(folder: Path, name: str, spelling: int = 5, seed: int = 0) -> Path:
    """A checkpoint of one of the SHAPES."""
    return save(build(SHAPES[name], seed), folder, spelling)


def theirs(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint as transformers reads it."""
    plain = json.loads((folder / "config.json").read_text())
    # Files of Gemma 1 say gelu and mean its tanh approximation. transformers 5.17 takes the word as it is.
    is_legacy = (plain["model_type"], plain.get("hidden_act")) == ("gemma", "gelu")
    meant = {"hidden_act": "gelu_pytorch_tanh"} if is_legacy else {}
    return auto(plain).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **meant).eval()


def ours(
    folder: Path,
    adapter: NoAdapter | LoRAConfig = FULL,
    precision: PrecisionConfig = FP32,
    memory: MemoryConfig = PLAINLY,
    seed: int = 0,
    compile: bool = False,
) -> Decoder:
    """The checkpoint as we read it."""
    run = DistributedContext(seed, "cpu")
    return assemble.build_model(
        HFCheckpoint.open(folder), NoQuantization(), adapter, precision, memory, run, compile=compile
    )


def opened(folder: Path) -> Decoder:
    """A checkpoint, or an adapter on its base, ready to be asked in fp32."""
    return assemble.load_for_inference(str(folder), FP32, DistributedContext(0, "cpu"))[0].eval()


def tokens(rows: int = 2, length: int = 23, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(rows: torch.Tensor) -> Batch:
    """Rows of which every second token is learnt."""
    targets = F.pad(rows[:, 1:], (0, 1), value=IGNORE)
    targets[:, ::2] = IGNORE
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    return Batch(rows, targets, positions, None, int((targets != IGNORE).sum()), rows.numel())


def train(model: Decoder, adapter: NoAdapter | LoRAConfig, steps: int = 3) -> None:
    """Some steps of fine-tuning, large ones."""
    optimizer = AdamWConfig(lr=0.01).build(adapter.trained(model))
    for step in range(steps):
        part = batch(tokens(seed=10 + step))
        (CrossEntropy()(model, part) / part.learnt).backward()
        optimizer.step()
        optimizer.zero_grad()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    assert found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def gradients(model: Decoder, source: HFCheckpoint) -> dict[str, torch.Tensor]:
    """Gradients of the trained weights by their Hub names, in the layout of the checkpoint."""
    from_us = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    moves = [move for move in source.moves if move.ours[0] in from_us]
    return {hub: g for m in moves for hub, g in zip(m.hub, m.op.save([from_us[n] for n in m.ours]), strict=True)}


def their_gradients(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients of a model of transformers as it would write them, were they its weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for mine, p in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        twin.save_pretrained(folder)
        return {name: grad.clone() for name, grad in load_file(Path(folder) / "model.safetensors").items()}


def shuffle_adapter(model: nn.Module, seed: int = 2) -> None:
    """Give every tensor of an adapter numbers of its own; magnitudes stay near what they are."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search(r"lora_(embedding_)?[AB]", name):
                p.normal_(std=0.3)
            elif "magnitude" in name:
                p.mul_(torch.empty_like(p).uniform_(0.7, 1.3))
