"""Models with delta nets: packed rows, padding, recomputed layers, memory, fresh weights, and every layout of files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.checkpoints import (
    DEFAULT_MEMORY,
    FP32,
    FULL,
    SHAPES,
    load_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    save,
)
from tunekit import build
from tunekit.checkpoint import save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.forward_context import ForwardContext
from tunekit.models.gated_delta_net import DeltaState, GatedDeltaNet
from tunekit.models.spec import DeltaNet
from tunekit.quantization.config import NoQuantization

Layout = Callable[[dict[str, Tensor]], dict[str, Tensor]]
NET = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
NET += ("linear_conv_kernel_dim", "layer_types", "num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps")
NET += ("max_position_embeddings", "tie_word_embeddings")
MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
OPTIONAL = {"qwen3-next-mixed": (*NET, *MOE, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")}
OPTIONAL |= {"qwen3.5": NET, "qwen3.5-moe": (*NET, *MOE)}
NAMES = ["qwen3-next-mixed", "qwen3.5", "qwen3.5-moe-tied"]


def gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def nets(model: Decoder) -> list[GatedDeltaNet]:
    return [module for module in model.modules() if isinstance(module, GatedDeltaNet)]


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_documents(name: str, tmp_path: Path) -> None:
    """Logits and gradients of rows that hold several documents, and of each document alone."""
    model = load_model(make_checkpoint(tmp_path, name))
    rows, bounds = random_tokens(2, 40), [0, 1, 3, 33, 40, 59, 80]
    parts = rows.flatten().split(torch.tensor(bounds).diff().tolist())
    positions = torch.cat([torch.arange(len(part)) for part in parts]).view_as(rows)
    packed = model(rows, positions, SequenceLayout(torch.tensor(bounds, dtype=torch.int32)))
    alone = torch.cat([model(part[None])[0] for part in parts]).view_as(packed)
    assert relative_error(packed, alone) < 1e-5
    weight = torch.randn_like(packed)
    found, wanted = gradients(model, (packed * weight).sum()), gradients(model, (alone * weight).sum())
    assert max(relative_error(found[key], grad) for key, grad in wanted.items()) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_padding_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """After a first pass over rows of several lengths every net keeps what it keeps of each row alone."""
    model = load_model(make_checkpoint(tmp_path, name)).eval()
    lengths = [5, 1, 19, 2]
    rows = [random_tokens(1, length, seed=length)[0] for length in lengths]

    @torch.no_grad()
    def kept(batch: Tensor, lengths: list[int]) -> list[DeltaState]:
        cache = model.cache(len(batch), 30)
        model(batch, cache=cache, lengths=torch.tensor(lengths))
        return [layer for layer in cache.layers if isinstance(layer, DeltaState)]

    together = kept(pad_sequence(rows, batch_first=True, padding_value=3), lengths)
    assert len(together) == len(nets(model)) > 0
    for i, row in enumerate(rows):
        for found, wanted in zip(together, kept(row[None], [len(row)]), strict=True):
            assert relative_error(found.tail[i], wanted.tail[0]) < 1e-5
            assert relative_error(found.states[i], wanted.states[0]) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_layers_run_again_have_the_same_gradients(name: str, tmp_path: Path) -> None:
    folder, rows = make_checkpoint(tmp_path, name), random_tokens(2, 70)
    layout = SequenceLayout(torch.tensor([0, 33, 70, 140], dtype=torch.int32))
    plain, again = load_model(folder), load_model(folder, memory=MemoryConfig(activation_checkpointing="full"))
    weight = torch.randn(2, 70, 67)
    found, wanted = (gradients(m, (m(rows, layout=layout) * weight).sum()) for m in (again, plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], grad) for key, grad in wanted.items())


@pytest.mark.slow
def test_compiled_layers(tmp_path: Path) -> None:
    """The rule itself is not compiled; rows of several lengths go through one model."""
    folder = make_checkpoint(tmp_path, "qwen3.5")
    plain, compiled = load_model(folder), load_model(folder, compile=True)
    for length in (20, 140):
        rows = random_tokens(2, length)
        weight = torch.randn(2, length, 67)
        found, wanted = (gradients(m, (m(rows) * weight).sum()) for m in (compiled, plain))
        assert max(relative_error(found[key], grad) for key, grad in wanted.items()) < 1e-4


def test_what_is_kept_for_gradients() -> None:
    """Of the rule nothing but what goes in, which is an eighth of what its steps make."""
    net = GatedDeltaNet(16, DeltaNet(k_heads=4, v_heads=8, k_dim=32, v_dim=32, conv=4)).requires_grad_(False)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x = torch.randn(1, 256, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        net(x, ForwardContext(torch.arange(256)[None], None, None, ()))
    projections = 4 * 256 * (net.in_proj_qkv.out_features + net.in_proj_z.out_features)
    assert sum(kept.values()) < 4 * projections


@pytest.mark.parametrize("name", NAMES)
def test_fresh_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """What is not random is equal, names are, and what is random has the same spread."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SHAPES[name] | {"linear_num_value_heads": 48})
    save(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "theirs")
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    source = HFCheckpoint.open(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    model = build.build_model(
        source, NoQuantization(), FULL, FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu"), fresh=True
    )
    save_model.save_model(tmp_path / "ours", model, source, quiet=True)
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        if tensor.unique().numel() == 1:
            assert torch.equal(tensor, wanted[key]), key
        elif "A_log" in key or "conv1d" in key:
            assert 0.7 < (tensor.exp().std() / wanted[key].exp().std()) < 1.4, key
            assert tensor.exp().max() < 16


def change(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts in two tensors a layer, as Qwen publishes those of Qwen3.5."""
    single = {name: t for name, t in tensors.items() if ".experts." in name}
    found = {name: t for name, t in tensors.items() if name not in single}
    for prefix in {name.partition(".experts.")[0] + ".experts." for name in single}:
        gate, up, down = (
            torch.stack([single[f"{prefix}{e}.{leaf}_proj.weight"] for e in range(7)])
            for leaf in ("gate", "up", "down")
        )
        found |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    return found


def inside(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that transformers gives to a text model taken out of a larger one."""
    return {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}


def predicting(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a layer that predicts further tokens, which we never load."""
    extra = {"mtp.fc.weight": torch.randn(3, 4).bfloat16(), "mtp.layers.0.mlp.experts.2.up_proj.weight": torch.randn(2)}
    return tensors | extra


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe", "qwen3.5-moe-vision"])
@pytest.mark.parametrize("layout", [stacked, predicting])
def test_layouts_of_files(name: str, layout: Layout, tmp_path: Path) -> None:
    same_in_another(make_checkpoint(tmp_path / "made", name), layout, tmp_path)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_text_models_out_of_larger_ones(name: str, tmp_path: Path) -> None:
    same_in_another(make_checkpoint(tmp_path / "made", name), inside, tmp_path)


def same_in_another(folder: Path, layout: Layout, path: Path) -> None:
    """The model is the same, and it is written back bit for bit."""
    rows = random_tokens()
    with torch.no_grad():
        wanted = load_model(folder)(rows)
        tensors = layout(load_file(folder / "model.safetensors"))
        model = load_model(change(folder, tensors))
        assert torch.equal(model(rows), wanted)
    (path / "written").mkdir()
    save_model.save_model(path / "written", model, HFCheckpoint.open(folder), quiet=True)
    found = load_file(path / "written" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(t.dtype == found[name].dtype and torch.equal(t, found[name]) for name, t in tensors.items())


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in OPTIONAL.items() for key in keys])
def test_what_config_leaves_out_is_what_transformers_takes(name: str, key: str) -> None:
    sizes = {"num_attention_heads": 16, "linear_num_value_heads": 48, "num_experts": 16}
    shape = {k: value for k, value in (SHAPES[name] | sizes).items() if k != key}
    whole = transformers.AutoConfig.for_model(**shape).to_dict()
    assert find_family(shape, "config.json")[1] == find_family(whole, "config.json")[1]


@pytest.mark.parametrize(("change", "error"), [
    ({"linear_num_value_heads": 5}, "no multiple of linear_num_key_heads 2"),
    ({"layer_types": ["linear_attention"]}, "layer_types speaks of 1 layers, num_hidden_layers of 3"),
    ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "'sliding_attention' is not"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
])  # fmt: skip
def test_what_no_model_can_be(change: dict, error: str) -> None:
    with pytest.raises(UserError, match=error):
        find_family(SHAPES["qwen3.5"] | change, "config.json")
