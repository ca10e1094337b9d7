"""Differences between tunekit and transformers for a family, measured on a random checkpoint of odd shape."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import nn

from tests.helpers.random_checkpoints import (
    gradients,
    load_inference_model,
    load_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    rewrite_config,
    to_transformers4_config,
    train,
    transformers_gradients,
)
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import atomic, final_checkpoint, save_model
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.merge import merge_adapter
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder
from tunekit.models.spec import DecoderSpec, DeltaNet, DenseMoE, Mamba2, MoE, ParallelMixers

WEIGHTS = "model.safetensors"
TransformersModel = transformers.PreTrainedModel
PROMPTS = [random_tokens(1, length, seed=length)[0].tolist() for length in (13, 1, 6)]
STEPS_ALONE = 4  # of the longest prompt
STEPS = 9  # longer than windows, chunks and the short context of LongRoPE

# Rounding errors of a layer, in units of the last bit of fp32: three times the largest of all shapes with AVX2 and with
# AVX-512, which order sums differently. Recurrent layers feed their errors back at each token.
LOGIT_ROUNDING, RECURRENT_LOGIT_ROUNDING = 27, 320
GRADIENT_ROUNDING, RECURRENT_GRADIENT_ROUNDING = 160, 400


@dataclass(frozen=True)
class ParityErrors:
    """Errors are relative to the largest absolute value of a tensor; `gradients` is the maximum over all tensors."""

    logits: float
    gradients: float
    generation: str  # the differences; empty if there are none
    files: str
    config_versions: str


def measure_parity(name: str) -> ParityErrors:
    """All errors of a family."""
    with TemporaryDirectory() as path:
        folder = make_checkpoint(Path(path) / "model", name)
        model, reference = load_model(folder), load_transformers_model(folder)
        with torch.no_grad():
            logits = relative_error(model(random_tokens()), reference(random_tokens()).logits)
        errors = max_gradient_error(model, reference, HFCheckpoint.open(folder)), compare_generation(model, reference)
        return ParityErrors(
            logits, *errors, compare_saved_weights(folder, model, Path(path)), compare_config_versions(folder, model)
        )


def max_gradient_error(model: Decoder, reference: TransformersModel, source: HFCheckpoint) -> float:
    rows = random_tokens(3, 17)
    for logits in (model(rows), reference(rows).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
    actual, expected = gradients(model, source), transformers_gradients(reference)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}  # as in transformers, buffers
    untrained = {
        name for move in source.all_key_mappings if not move.ours or move.ours[0] in frozen for name in move.hub
    }
    assert actual.keys() == expected.keys() - untrained
    # A bias of the keys adds the same value to all scores of a query: its gradient is only rounding error.
    return max(relative_error(actual[name], expected[name]) for name in actual if expected[name].abs().max() > 1e-6)


def compare_generation(model: Decoder, reference: TransformersModel) -> str:
    """Compare greedy decoding of a batch with decoding one prompt, and with transformers without a cache."""
    together = generate_batch(model, PROMPTS, SamplingConfig(max_new_tokens=STEPS), frozenset())
    alone = generate_batch(model, PROMPTS[:1], SamplingConfig(max_new_tokens=STEPS_ALONE), frozenset())
    problems = [] if alone[0] == together[0][:STEPS_ALONE] else [f"alone: {alone[0]}, together: {together[0]}"]
    for prompt, answer in zip(PROMPTS, together, strict=True):
        if (
            uncached := greedy_tokens_without_cache(reference, prompt, answer, bool(model.rope_switch_lengths))
        ) != answer:
            problems.append(f"without a cache: {uncached}, with one: {answer}")
    return "; ".join(problems)


@torch.no_grad()
def greedy_tokens_without_cache(
    model: TransformersModel, prompt: list[int], answer: list[int], grows: bool
) -> list[int]:
    """Most likely token after each prefix of the answer. With `grows`, RoPE depends on the length: run each prefix
    alone.
    """
    row = torch.tensor([prompt + answer[:-1]])
    if not grows:
        return model(row).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return [int(model(row[:, :end]).logits[0, -1].argmax()) for end in range(len(prompt), row.shape[1] + 1)]


def compare_saved_weights(source: Path, model: Decoder, path: Path) -> str:
    """Compare saved weights bit by bit with those that were loaded."""
    (path / "written").mkdir()
    save_model.save_model(path / "written", model, HFCheckpoint.open(source), quiet=True)
    expected, actual = (load_file(folder / "model.safetensors") for folder in (source, path / "written"))
    if actual.keys() != expected.keys():
        return f"names: {sorted(actual.keys() ^ expected.keys())}"
    return ", ".join(n for n, t in expected.items() if t.dtype != actual[n].dtype or not torch.equal(t, actual[n]))


def compare_config_versions(folder: Path, model: Decoder) -> str:
    """Compare the model of a transformers 4 config.json with that of transformers 5, in transformers and in tunekit."""
    new = transformers.AutoConfig.from_pretrained(folder)
    rewrite_config(folder, to_transformers4_config)
    old = transformers.AutoConfig.from_pretrained(folder)
    if changes := [*diff_configs(new.to_dict(), old.to_dict())]:
        return f"to transformers: {changes}"
    return "" if HFCheckpoint.open(folder).spec == model.spec else "to us"


# Legacy keys that transformers keeps after it has converted them.
IGNORED_KEYS = {"transformers_version", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
IGNORED_KEYS |= {"sliding_window_pattern", "_sliding_window_pattern", "type"}


def diff_configs(new: dict[str, Any], old: dict[str, Any]) -> Iterator[str]:
    """Keys whose values differ, including nested ones."""
    for key in (new | old).keys() - IGNORED_KEYS:
        a, b = new.get(key), old.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from diff_configs(a, b)
        elif a != b:
            yield f"{key}: {a}, {b}"


@dataclass(frozen=True)
class AdapterErrors:
    """Errors of logits: of an adapter in peft, and of its files, and those that peft saves, in tunekit."""

    in_peft: float
    from_files: float


@torch.no_grad()
def measure_adapter_parity(
    path: Path, name: str, adapter: LoRAConfig, saved_by_peft: bool = False
) -> tuple[Decoder, AdapterErrors]:
    """Train an adapter for a checkpoint, open it with peft, and load it for inference, and what peft saves."""
    folder, model = train_adapter(path, name, adapter)
    base = load_transformers_model(path / "base")
    base_logits = base(random_tokens()).logits
    peft_model = open_with_peft(base, folder)
    expected = peft_model(random_tokens()).logits
    assert relative_error(base_logits, expected) > 1e-2, "training changed the logits"
    folders = [folder]
    if saved_by_peft:
        peft_model.save_pretrained(path / "back")
        folders.append(path / "back")
    in_peft, *from_files = (
        relative_error(loaded(random_tokens()), expected) for loaded in (model, *map(load_inference_model, folders))
    )
    return model, AdapterErrors(in_peft, max(from_files))


def train_adapter(path: Path, name: str, adapter: LoRAConfig) -> tuple[Path, Decoder]:
    """Write a base, and train and write an adapter for it."""
    base = make_checkpoint(path / "base", name)
    model = load_model(base, adapter)
    with torch.enable_grad():
        train(model, adapter, steps=2)  # A does not change in the first
    with atomic.AtomicDir(path / "adapter") as out:
        final_checkpoint.save_final(adapter, out, model, HFCheckpoint.open(base))
    return path / "adapter", model.eval()


def open_with_peft(base: nn.Module, folder: Path) -> peft.PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # for example about missing or unexpected keys
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match.*")  # peft ignores parameters there
        return peft.PeftModel.from_pretrained(base, folder).eval()


def max_logit_rounding(spec: DecoderSpec) -> float:
    """Maximum relative error of logits in fp32 from the order of sums."""
    return sum_rounding(spec, LOGIT_ROUNDING, RECURRENT_LOGIT_ROUNDING)


def max_gradient_rounding(spec: DecoderSpec) -> float:
    """Maximum relative error of the gradients of a weight in fp32 from the order of sums."""
    return sum_rounding(spec, GRADIENT_ROUNDING, RECURRENT_GRADIENT_ROUNDING)


def sum_rounding(spec: DecoderSpec, other: float, recurrent: float) -> float:
    num_recurrent = sum(isinstance(layer.mixer, DeltaNet | Mamba2 | ParallelMixers) for layer in spec.layers)
    return torch.finfo(torch.float32).eps * (num_recurrent * recurrent + (len(spec.layers) - num_recurrent) * other)


def has_experts(spec: DecoderSpec) -> bool:
    return any(isinstance(layer.ffn, MoE | DenseMoE) for layer in spec.layers)


def max_token_error(actual: torch.Tensor, expected: torch.Tensor, has_near_ties: bool) -> float:
    """Maximum error of the logits of a token, without that of the worst token if the last bit decides between equally
    good experts.
    """
    errors = ((actual - expected).abs().amax(-1) / expected.abs().max()).flatten().sort(descending=True).values
    return errors[int(has_near_ties)].item()


def merge(path: Path) -> Path:
    """Merge `base` and `adapter` of a directory."""
    with atomic.AtomicDir(path / "merged") as out:
        merge_adapter(HFCheckpoint.open(path / "base"), AdapterDir.open(path / "adapter"), out, quiet=True)
    return path / "merged"


@torch.no_grad()
def check_merge(path: Path, model: Decoder) -> None:
    """Check that the merged checkpoint gives the logits of the trained model in tunekit and in transformers."""
    out, expected = merge(path), model(random_tokens())
    for logits in (load_model(out)(random_tokens()), load_transformers_model(out)(random_tokens()).logits):
        assert max_token_error(logits, expected, has_experts(model.spec)) < max_logit_rounding(model.spec)
    before, after = load_file(path / "base" / WEIGHTS), load_file(out / WEIGHTS)
    assert {t.dtype for t in after.values()} == {t.dtype for t in before.values()}
