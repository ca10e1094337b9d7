"""New tokens: embeddings resized as by transformers, rows that PEFT opens, and tokenizers that transformers opens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.helpers.random_checkpoints import (
    FP32,
    SHAPES,
    VOCAB_SIZE,
    load_inference_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    shallow_shape,
    train,
)
from tunekit import build
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint, merge
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.new_tokens import TokenTexts
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.quantization.config import NF4Config, NoQuantization

PLAIN, SPECIAL = ("<tool>", "<call>"), ("<|end|>",)
NEW = VOCAB_SIZE + len(PLAIN) + len(SPECIAL)
TOKENS = torch.cat([random_tokens(), torch.tensor([[67, 68, 69], [69, 67, 67]])], dim=1)
TEXTS = "w1 <tool> w2<|end|>w3 <call>"
LORA = LoRAConfig(4)


def open_extended(folder: Path, tokens: TokenTexts = PLAIN, special: TokenTexts = SPECIAL) -> HFCheckpoint:
    return HFCheckpoint.open(folder).with_new_tokens(tokens, special)


def load(source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, quantization: NoQuantization | None = None) -> Decoder:
    dist = DistributedContext(0, "cpu")
    return build.build_model(source, quantization or NoQuantization(), adapter, FP32, MemoryConfig(), dist).eval()


def save(folder: Path, adapter: NoAdapter | LoRAConfig, model: Decoder, source: HFCheckpoint) -> Path:
    with atomic.AtomicDir(folder) as out:
        final_checkpoint.save_final(adapter, out, model, source)
    return folder


@torch.no_grad()
def resized(folder: Path) -> Any:
    """Model resized by transformers, without the noise with a standard deviation of 3e-5 that it adds to the mean."""
    model = load_transformers_model(folder)
    model.resize_token_embeddings(NEW)
    for name, parameter in model.named_parameters():
        if ("embed" in name or "lm_head" in name) and len(parameter) == NEW:
            mean = parameter[:VOCAB_SIZE].mean(0).expand(NEW - VOCAB_SIZE, -1)
            torch.testing.assert_close(parameter[VOCAB_SIZE:], mean, atol=2e-4, rtol=1e-3)
            parameter[VOCAB_SIZE:] = mean
    return model


# Their embeddings have rows outside the vocabulary, or their per-layer embeddings have a smaller one.
FIXED = ("mllama", "gemma3n_text")
BY_TYPE = {shape["model_type"]: name for name, shape in SHAPES.items()}


@pytest.mark.parametrize("model_type", FIXED)
def test_models_without_room_for_new_tokens(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"config.json: the embeddings of model type {model_type} cannot get new rows"):
        open_extended(make_checkpoint(tmp_path / "base", BY_TYPE[model_type]))


@pytest.mark.parametrize("shape", [name for model_type, name in BY_TYPE.items() if model_type not in FIXED])
@torch.no_grad()
def test_resized_model_equals_transformers(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, and as files, for one shape of every model type."""
    monkeypatch.setitem(SHAPES, shape, shallow_shape(shape))
    base = make_checkpoint(tmp_path / "base", shape)
    source = open_extended(base)
    model, expected = load(source, NoAdapter()), resized(base)(TOKENS).logits
    logits = model(TOKENS)
    assert relative_error(logits, expected) < 3e-5
    old = random_tokens()
    unchanged = load_inference_model(base)(old)
    assert torch.equal(model(old)[..., :VOCAB_SIZE], unchanged), "logits of old tokens do not change"
    saved = load_transformers_model(save(tmp_path / "out", NoAdapter(), model, source))
    assert saved.config.get_text_config().vocab_size == NEW
    assert relative_error(saved(TOKENS).logits, logits) < 3e-5


def test_tokenizer_equals_that_of_transformers(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama3.2")
    expected = transformers.AutoTokenizer.from_pretrained(base)
    expected.add_tokens([*PLAIN])
    expected.add_tokens([*SPECIAL], special_tokens=True)
    source = open_extended(base)
    for name, adapter in {"full": NoAdapter(), "adapter": LORA}.items():
        folder = save(tmp_path / name, adapter, load(source, adapter), source)
        actual = transformers.AutoTokenizer.from_pretrained(folder)
        assert actual.get_vocab() == expected.get_vocab() and len(actual) == NEW
        ids = actual(TEXTS)["input_ids"]
        assert ids == expected(TEXTS)["input_ids"] == source.chat_tokenizer.encode(TEXTS)
        assert actual.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
        assert {67, 68, 69} <= {*ids}


def test_files_of_older_tokenizers_list_the_new_tokens(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama3.2")
    config = json.loads((base / "tokenizer_config.json").read_text()) | {"added_tokens_decoder": {}}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / "added_tokens.json").write_text("{}")
    source = open_extended(base)
    folder = save(tmp_path / "out", NoAdapter(), load(source, NoAdapter()), source)
    listed = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    new = {"<tool>": 67, "<call>": 68, "<|end|>": 69}
    assert [(listed[str(id)]["content"], listed[str(id)]["special"]) for id in new.values()] == [
        (text, text == "<|end|>") for text in new
    ]
    assert new.items() <= json.loads((folder / "added_tokens.json").read_text()).items()
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == NEW


@torch.no_grad()
def test_descriptions_are_means_of_their_tokens(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama3.1")
    source = open_extended(base, {"<tool>": "w7 w9 w9"}, ())
    model, before = load(source, NoAdapter()), load_inference_model(base)
    ids = source.chat_tokenizer.encode("w7 w9 w9")
    for name in ("embed", "head"):
        weight, old = model.get_parameter(f"{name}.weight"), before.get_parameter(f"{name}.weight")
        torch.testing.assert_close(weight[67], old[ids].mean(0))
        assert torch.equal(weight[:67], old)


@torch.no_grad()
def test_unused_rows_are_used_first(tmp_path: Path) -> None:
    """transformers resizes only if the tokenizer has more tokens than the model."""
    base = make_checkpoint(tmp_path / "base", "llama3.2")
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["vocab"] = {text: id for text, id in content["model"]["vocab"].items() if id < 65}
    (base / "tokenizer.json").write_text(json.dumps(content))
    source = open_extended(base)
    assert source.trained_ids == (65, 66, 67) and source.spec.vocab == 68
    weight, old = (load(item, NoAdapter()).embed.weight for item in (source, HFCheckpoint.open(base)))
    assert torch.equal(weight[:65], old[:65])
    torch.testing.assert_close(weight[65:], old.mean(0).expand(3, -1))
    assert open_extended(base, ("<tool>",), ()).spec.vocab == VOCAB_SIZE


ADAPTERS = {
    "tied": ("llama3.2", LORA),
    "untied": ("llama3.1", LORA),
    "dora": ("llama3.1", DoRAConfig(4)),
    "scaled embedding": ("gemma3", LORA),
    "experts": ("mixtral", LoRAConfig(4, target_modules=("experts", "attn"))),
    "saved embedding": ("llama3.1", LoRAConfig(4, modules_to_save=("embed",))),
    "saved": ("llama3.1", LoRAConfig(4, modules_to_save=("embed", "head"))),
    "tied saved": ("llama3.2", LoRAConfig(4, modules_to_save=("embed",))),
    "other tokens": ("llama3.1", LoRAConfig(4, trainable_token_indices=(5, 66, 2))),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_peft_opens_trained_rows(case: str, tmp_path: Path) -> None:
    """PEFT, tunekit, and the merged checkpoint in transformers give the logits of the model in memory."""
    shape, adapter = ADAPTERS[case]
    base = make_checkpoint(tmp_path / "base", shape)
    source = open_extended(base)
    model = load(source, adapter)
    initial = model(TOKENS).detach()
    train_rows(model, adapter)
    folder, logits = save(tmp_path / "adapter", adapter, model, source), model.eval()(TOKENS).detach()
    assert relative_error(logits, initial) > 1e-2
    assert relative_error(load_inference_model(folder)(TOKENS), logits) < 1e-6
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert relative_error(opened(TOKENS).logits, logits) < 3e-5
    checkpoint, config, tokenizer = build.resolve_model(str(folder))
    assert checkpoint.spec.vocab == NEW and tokenizer.encode("<|end|>") == [69]
    with atomic.AtomicDir(tmp_path / "merged") as out:
        assert not merge.merge_adapter(checkpoint, checkpoint.open_adapter(folder), out)
    assert relative_error(load_transformers_model(tmp_path / "merged")(TOKENS).logits, logits) < 3e-5
    continued = replace(config, adapter_path=str(folder))
    assert relative_error(load(checkpoint, continued)(TOKENS), logits) < 1e-6


def train_rows(model: Decoder, adapter: NoAdapter | LoRAConfig) -> None:
    """Train on rows with new tokens too. Old rows of frozen embeddings do not change."""
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    train(model, adapter)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_token_rows" in name:
                assert parameter.grad is None or parameter.requires_grad
                parameter.add_(torch.randn_like(parameter) * 0.3)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("is_resized", [False, True])
@pytest.mark.parametrize("shape", ["llama3.1", "llama3.2"])
def test_rows_that_peft_has_trained(shape: str, is_resized: bool, by_module: bool, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", shape)
    model = resized(base) if is_resized else load_transformers_model(base)
    model.name_or_path = str(base)
    ids: Any = [68, 67, 69] if is_resized else [9, 3]
    ids = {"embed_tokens": ids, "lm_head": ids} if by_module else ids
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=ids, task_type="CAUSAL_LM")
    opened = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in opened.named_parameters():
            if "trainable_tokens_delta" in name or "lora_B" in name:
                parameter.normal_()
        tokens = TOKENS if is_resized else random_tokens()
        logits = opened.eval()(tokens).logits
    opened.save_pretrained(tmp_path / "adapter")
    ours = load_inference_model(tmp_path / "adapter")
    assert relative_error(ours(tokens), logits) < 3e-5
    checkpoint, _, _ = build.resolve_model(str(tmp_path / "adapter"))
    with atomic.AtomicDir(tmp_path / "merged") as out:
        merge.merge_adapter(checkpoint, checkpoint.open_adapter(tmp_path / "adapter"), out)
    assert relative_error(load_transformers_model(tmp_path / "merged")(tokens).logits, logits) < 3e-5


def test_quantized_base(tmp_path: Path) -> None:
    """The rows are those of an unquantized embedding: the saved adapter gives the same logits on the same base."""
    base = make_checkpoint(tmp_path / "base", "llama3.2")
    source, nf4 = open_extended(base), NF4Config()
    model = load(source, LORA, nf4)
    train_rows(model, LORA)
    folder = save(tmp_path / "adapter", LORA, model, source)
    checkpoint, config, _ = build.resolve_model(str(folder))
    assert torch.equal(load(checkpoint, config, nf4)(TOKENS), model.eval()(TOKENS))


@pytest.mark.parametrize(
    ("tokens", "special", "problem"),
    [
        (("w1",), (), r"^new_tokens: 'w1' is already token 5\. Remove it\."),
        ((), ("</s>",), r"^new_special_tokens: '</s>' is already token 1\."),
        (("<a>", "<a>"), (), r"^new_tokens: '<a>' is listed twice\."),
        (("<a>",), ("<a>",), r"^new_special_tokens: '<a>' is listed twice\."),
        (("",), (), r"^new_tokens: a token must not be empty\."),
        ({"<a>": "  "}, (), r"^new_tokens\.<a>: '  ' has no tokens\."),
    ],
)
def test_tokens_that_cannot_be_added(tokens: TokenTexts, special: TokenTexts, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        open_extended(make_checkpoint(tmp_path, "llama3.2"), tokens, special)


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        (LoRAConfig(4, target_modules=("attn", "embed")), r"^adapter\.target_modules: embed"),
        (LoRAConfig(4, trainable_token_indices=(70,)), r"^adapter\.trainable_token_indices: must be < 70, got 70"),
        (NoAdapter(trainable_modules="attn"), r"^adapter\.trainable_modules: "),
        (NoAdapter(frozen_modules="embed_tokens"), r"^adapter\.frozen_modules: "),
    ],
)
def test_adapters_that_do_not_train_new_tokens(adapter: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        load(open_extended(make_checkpoint(tmp_path, "llama3.1")), adapter)
