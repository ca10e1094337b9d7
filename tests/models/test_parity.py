"""Every family against transformers, on random checkpoints of odd shapes: logits, gradients, files, generation."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.checkpoints import SHAPES, error, gradients, made, ours, save, their_gradients, theirs, tokens
from tunekit.checkpoint.folder import Folder
from tunekit.generate import Sampling, complete
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import family
from tunekit.models.spec import DecoderSpec

Pair = tuple[Path, Decoder, transformers.PreTrainedModel]


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = made(tmp_path_factory.mktemp("model"), request.param)
    return folder, ours(folder), theirs(folder)


def test_logits(pair: Pair) -> None:
    _, mine, other = pair
    with torch.no_grad():
        assert error(mine(tokens()), other(tokens()).logits) < 1e-5


def test_the_spelling_of_transformers_4(pair: Pair, tmp_path: Path) -> None:
    _, mine, other = pair
    older = save(other, tmp_path, spelling=4)
    assert Folder.open(older).spec == mine.spec
    with torch.no_grad():
        assert torch.equal(theirs(older)(tokens()).logits, other(tokens()).logits), "the older spelling means the same"
        assert torch.equal(ours(older)(tokens()), mine(tokens()))


def test_gradients(pair: Pair) -> None:
    folder, mine, other = pair
    batch = tokens(3, 17)
    for logits in (mine(batch), other(batch).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    source = Folder.open(folder)
    found, wanted = gradients(mine, source), their_gradients(other)
    mine.zero_grad(), other.zero_grad()
    stored = {name for name, p in mine.named_parameters() if not p.requires_grad}  # as with transformers, its buffers
    untrained = {name for move in source.all_moves if not move.ours or move.ours[0] in stored for name in move.hub}
    assert found.keys() == wanted.keys() - untrained
    # A bias on keys moves all scores of a query alike: its gradient is rounding.
    wrong = {name: error(found[name], wanted[name]) for name in found if wanted[name].abs().max() > 1e-6}
    assert max(wrong.values()) < 1e-4, wrong


def test_generation_is_that_of_transformers(pair: Pair) -> None:
    _, mine, other = pair
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (9, 1, 4, 13)]
    together = complete(mine, prompts, Sampling(tokens=12), frozenset())
    for prompt, answer in zip(prompts, together, strict=True):
        assert complete(mine, [prompt], Sampling(tokens=12), frozenset()) == [answer]
        wanted = other.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )
        assert wanted[0, len(prompt) :].tolist() == answer
        assert uncached(mine, prompt, 12) == answer


@torch.no_grad()
def uncached(model: Decoder, prompt: list[int], count: int) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) :]


# What config.json may leave out, beside the sizes that every file states.
OPTIONAL = {
    "llama2": ("rope_parameters", "head_dim", "num_key_value_heads", "hidden_act", "rms_norm_eps", "attention_bias",
               "mlp_bias", "tie_word_embeddings", "initializer_range", "max_position_embeddings"),
    "mistral": ("rope_parameters", "head_dim", "sliding_window", "num_key_value_heads", "max_position_embeddings"),
    "qwen2-sliding": ("rope_parameters", "sliding_window", "max_window_layers", "layer_types", "num_key_value_heads"),
    "qwen3": ("rope_parameters", "head_dim", "attention_bias", "use_sliding_window", "max_position_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in OPTIONAL.items() for key in keys])
def test_what_config_leaves_out_is_what_transformers_takes(name: str, key: str) -> None:
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 30}
    shape = {k: value for k, value in (SHAPES[name] | sizes).items() if k != key}
    whole = transformers.AutoConfig.for_model(**shape).to_dict()
    assert spec(shape) == spec(whole)


@pytest.mark.parametrize(("name", "key", "spoken"), [
    ("llama2", "num_key_value_heads", 6), ("llama2", "head_dim", 8), 
    ("qwen2", "num_key_value_heads", 5), ("qwen3", "num_key_value_heads", 6),
])  # fmt: skip
def test_null_is_what_transformers_takes_it_for(name: str, key: str, spoken: int) -> None:
    config = transformers.AutoConfig.for_model(**(SHAPES[name] | {key: None}))
    assert config.to_dict()[key] == spoken
    assert spec(SHAPES[name] | {key: None}) == spec(SHAPES[name] | {key: spoken})


def spec(config: dict) -> DecoderSpec:
    return family(config, "config.json")[1]
