"""How far a family is from transformers, in figures: on a random checkpoint of an odd shape, with both libraries."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from tests.checkpoints import (
    error,
    gradients,
    made,
    older,
    opened,
    ours,
    rewrite,
    their_gradients,
    theirs,
    tokens,
    train,
)
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import atomic, final_checkpoint, save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.generation.generate import SamplingConfig, generate_batch
from tunekit.models.decoder import Decoder

Theirs = transformers.PreTrainedModel
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (13, 1, 6)]
STEPS = 12  # beyond windows, chunks and the contexts of LongRoPE


@dataclass(frozen=True)
class Figures:
    """Errors are relative to the largest number of a tensor; `gradients` is the worst of all tensors."""

    logits: float
    gradients: float
    generation: str  # what is wrong; empty: nothing
    files: str
    spelling: str


@cache
def figures(name: str) -> Figures:
    """Measured once in a session."""
    with TemporaryDirectory() as path:
        folder = made(Path(path) / "model", name)
        mine, other = ours(folder), theirs(folder)
        with torch.no_grad():
            logits = error(mine(tokens()), other(tokens()).logits)
        found = worst_gradient(mine, other, HFCheckpoint.open(folder)), generation(mine, other)
        return Figures(logits, *found, files(folder, mine, Path(path)), spelling(folder, mine))


def worst_gradient(mine: Decoder, other: Theirs, source: HFCheckpoint) -> float:
    batch = tokens(3, 17)
    for logits in (mine(batch), other(batch).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    found, wanted = gradients(mine, source), their_gradients(other)
    stored = {name for name, p in mine.named_parameters() if not p.requires_grad}  # as with transformers, its buffers
    untrained = {name for move in source.all_moves if not move.ours or move.ours[0] in stored for name in move.hub}
    assert found.keys() == wanted.keys() - untrained
    # A bias on keys moves all scores of a query alike: its gradient is rounding.
    return max(error(found[name], wanted[name]) for name in found if wanted[name].abs().max() > 1e-6)


def generation(mine: Decoder, other: Theirs) -> str:
    """Answers of several prompts at once, of one alone, without a cache, and of transformers, token by token."""
    together = generate_batch(mine, PROMPTS, SamplingConfig(max_new_tokens=STEPS), frozenset())
    prompt, answer = PROMPTS[0], together[0]
    routes = {"alone": generate_batch(mine, [prompt], SamplingConfig(max_new_tokens=STEPS), frozenset())[0]}
    routes["transformers"] = other.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=STEPS,
        eos_token_id=None,
        pad_token_id=0,
        # transformers 5.17 empties the cache as rows outgrow the short factors, and then reads their last token only
        use_cache=not mine.edges,
    )[0, len(prompt) :].tolist()
    wrong = [f"{route}: {found}, together: {answer}" for route, found in routes.items() if found != answer]
    for prompt, answer in zip(PROMPTS, together, strict=True):
        if (found := uncached(other, prompt, answer, bool(mine.edges))) != answer:
            wrong.append(f"without a cache: {found}, with one: {answer}")
    return "; ".join(wrong)


@torch.no_grad()
def uncached(model: Theirs, prompt: list[int], answer: list[int], grows: bool) -> list[int]:
    """The likeliest token behind every part of an answer. Where rows turn otherwise as they grow, each part is read."""
    row = torch.tensor([prompt + answer[:-1]])
    if not grows:
        return model(row).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return [int(model(row[:, :end]).logits[0, -1].argmax()) for end in range(len(prompt), row.shape[1] + 1)]


def files(source: Path, mine: Decoder, path: Path) -> str:
    """Whether what we write is bit for bit what we read."""
    (path / "written").mkdir()
    save_model.save_model(path / "written", mine, HFCheckpoint.open(source), quiet=True)
    wanted, found = (load_file(folder / "model.safetensors") for folder in (source, path / "written"))
    if found.keys() != wanted.keys():
        return f"names: {sorted(found.keys() ^ wanted.keys())}"
    return ", ".join(n for n, t in wanted.items() if t.dtype != found[n].dtype or not torch.equal(t, found[n]))


def spelling(folder: Path, mine: Decoder) -> str:
    """Whether config.json in the words of transformers 4 means the same, to transformers and to us."""
    new = transformers.AutoConfig.from_pretrained(folder)
    rewrite(folder, older)
    old = transformers.AutoConfig.from_pretrained(folder)
    if wrong := [*differences(new.to_dict(), old.to_dict())]:
        return f"to transformers: {wrong}"
    return "" if HFCheckpoint.open(folder).spec == mine.spec else "to us"


# Old words that transformers passes on unread, once it has made new ones of them.
UNREAD = {"transformers_version", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
UNREAD |= {"sliding_window_pattern", "_sliding_window_pattern", "type"}


def differences(new: dict[str, Any], old: dict[str, Any]) -> Iterator[str]:
    """Keys of two configs that differ, in their parts too."""
    for key in (new | old).keys() - UNREAD:
        a, b = new.get(key), old.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b)
        elif a != b:
            yield f"{key}: {a}, {b}"


@dataclass(frozen=True)
class Adapted:
    """Errors of logits: of an adapter of ours in peft, and of the one that peft writes then, with us."""

    there: float
    back: float


def adapted(name: str, adapter: LoRAConfig) -> Adapted:
    """After three steps of training."""
    with TemporaryDirectory() as path, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        base, folder = made(Path(path) / "base", name), Path(path)
        model = ours(base, adapter)
        train(model, adapter)
        with atomic.AtomicDir(folder / "adapter") as out:
            final_checkpoint.save_final(adapter, out, model, HFCheckpoint.open(base))
        other = peft.PeftModel.from_pretrained(theirs(base), folder / "adapter").eval()
        other.save_pretrained(folder / "back")
        with torch.no_grad():
            wanted, plain = other(tokens()).logits, theirs(base)(tokens()).logits
            assert error(plain, wanted) > 1e-2, "it learnt something"
            there = error(model.eval()(tokens()), wanted)
            return Adapted(there, error(opened(folder / "back")(tokens()), wanted))
