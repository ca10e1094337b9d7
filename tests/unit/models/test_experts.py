"""Mixtures of experts, compared with their definition, with other layouts and with transformers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.random_checkpoints import (
    SHAPES,
    build,
    load_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    rewrite_config,
    save,
)
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import WEIGHTS, HFCheckpoint
from tunekit.checkpoint.save_model import save_model
from tunekit.errors import UserError
from tunekit.kernels.glu import gated_activation
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import MixtureOfExperts, Router
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import MoE
from tunekit.models.weight_init import init_weights

DIM = 16
PLAIN_MOE = MoE(8, 3, 16, norm_topk_prob=False)
SPECS = {
    "softmax": PLAIN_MOE,
    "normalized": MoE(8, 3, 16, scale=2.5),
    "odd": MoE(7, 2, 5),  # sizes that torch's grouped matmul does not support
    "one": MoE(
        8,
        1,
        16,
        scoring_func="top_sigmoid",
        norm_topk_prob=False,
        apply_router_weight_on_input=True,
        shared_intermediate_size=9,
    ),
    "biased": MoE(8, 3, 16, "clamped_swiglu", "top_softmax", norm_topk_prob=False, router_bias=True, bias=True),
    "corrected": MoE(8, 3, 16, scoring_func="sigmoid", groups=(4, 2), selection_bias=True, router_in_fp32=True),
    "grouped": MoE(8, 3, 16, groups=(2, 1), shared_intermediate_size=9, shared_gate=True),
}


def make_mixture(spec: MoE) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(DIM, spec)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.5)
    return layer


def reference_output(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """One token and one expert at a time, in float64."""
    spec, out = layer.spec, []
    for row in x.double():
        weights, chosen = reference_routing(layer.router, row)
        y = torch.zeros(DIM, dtype=torch.float64)
        for weight, expert in zip(weights, chosen, strict=True):
            scaled_row = row * weight if spec.apply_router_weight_on_input else row
            linears = layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj
            w = [linear.weight[expert].double() for linear in linears]
            b = [torch.zeros(()) if linear.bias is None else linear.bias[expert].double() for linear in linears]
            output = w[2] @ gated_activation(spec.act, w[0] @ scaled_row + b[0], w[1] @ scaled_row + b[1]) + b[2]
            y += output if spec.apply_router_weight_on_input else weight * output
        if layer.shared is not None:
            s = layer.shared
            shared = s.down_proj.weight.double() @ gated_activation(
                spec.act, s.gate_proj.weight.double() @ row, s.up_proj.weight.double() @ row
            )
            gate = layer.shared_gate
            y += shared if gate is None else shared * (gate.weight.double() @ row).sigmoid()
        out.append(y)
    return torch.stack(out)


def reference_routing(router: Router, row: Tensor) -> tuple[list[float], list[int]]:
    """Weights and indices of the experts of one token, computed with lists and sorting."""
    spec = router.spec
    logits = router.weight.double() @ row + (0 if router.bias is None else router.bias.double())
    scores = {"softmax": logits.softmax(0), "sigmoid": logits.sigmoid()}.get(spec.scoring_func, logits).tolist()
    shift = [0.0] * len(scores) if router.selection_bias is None else router.selection_bias.tolist()
    ranking = [score + add for score, add in zip(scores, shift, strict=True)]
    candidates = set(range(len(scores)))
    if spec.groups is not None:
        size = len(scores) // spec.groups[0]
        groups = [range(i, i + size) for i in range(0, len(scores), size)]
        num_best = 2 if spec.selection_bias else 1
        best_groups = sorted(
            groups, key=lambda group: -sum(sorted((ranking[e] for e in group), reverse=True)[:num_best])
        )
        candidates = {expert for group in best_groups[: spec.groups[1]] for expert in group}
    chosen = sorted(candidates, key=lambda expert: -ranking[expert])[: spec.top_k]
    weights = torch.tensor([scores[e] for e in chosen], dtype=torch.float64)
    weights = {"top_softmax": weights.softmax(0), "top_sigmoid": weights.sigmoid()}.get(spec.scoring_func, weights)
    weights = weights / weights.sum() if spec.norm_topk_prob else weights
    return (weights * spec.scale).tolist(), chosen


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_mixture_matches_its_definition(spec: MoE) -> None:
    layer, x = make_mixture(spec), torch.randn(4, 9, DIM)
    assert relative_error(layer(x).double(), reference_output(layer, x.flatten(0, 1)).view_as(x)) < 1e-5


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_mixture_gradients_match_its_definition(spec: MoE) -> None:
    layer, x = make_mixture(spec), torch.randn(2, 5, DIM)
    grad = torch.randn_like(x)
    actual = torch.autograd.grad(layer(x), layer_weights(layer), grad, materialize_grads=True)
    y = dense_output(layer, x)
    expected = torch.autograd.grad(y, layer_weights(layer), grad, materialize_grads=True)
    for (name, _), a, b in zip(trained_parameters(layer), actual, expected, strict=True):
        assert relative_error(a, b) < 1e-4 or b.abs().max() < 1e-6, name


def trained_parameters(layer: MixtureOfExperts) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in layer.named_parameters() if p.requires_grad]


def layer_weights(layer: MixtureOfExperts) -> list[torch.nn.Parameter]:
    return [p for _, p in trained_parameters(layer)]


def dense_output(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """All tokens through all experts, most with weight zero."""
    spec, rows = layer.spec, x.flatten(0, 1)
    weights, chosen = layer.router(rows)
    all_weights = torch.zeros(len(rows), spec.experts).scatter(1, chosen, weights)
    y = torch.zeros_like(rows)
    for expert, expert_weight in enumerate(all_weights.unbind(1)):
        scaled_rows = rows * expert_weight[:, None] if spec.apply_router_weight_on_input else rows
        linears = layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj
        (gw, gb), (uw, ub), (dw, db) = ((p.weight[expert], None if p.bias is None else p.bias[expert]) for p in linears)
        output = F.linear(
            gated_activation(spec.act, F.linear(scaled_rows, gw, gb), F.linear(scaled_rows, uw, ub)), dw, db
        )
        y = y + (output if spec.apply_router_weight_on_input else output * expert_weight[:, None])
    if layer.shared is not None:
        shared = layer.shared(rows)
        y = y + (shared if layer.shared_gate is None else shared * layer.shared_gate(rows).sigmoid())
    return y.view_as(x)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_row_does_not_depend_on_other_rows(spec: MoE) -> None:
    layer, x = make_mixture(spec), torch.randn(16, DIM)
    x[3] = x[8] = x[0]
    together = layer(x)
    assert torch.equal(together, layer(x)), "not deterministic"
    assert torch.equal(together[3], together[0])
    assert torch.equal(together[8], together[0])
    for i in range(len(x)):
        assert relative_error(layer(x[i : i + 1])[0], together[i]) < 3e-6


def test_unused_experts_have_zero_gradients() -> None:
    layer, x = make_mixture(MoE(8, 1, 16, router_bias=True)), torch.randn(2, 9, DIM)
    with torch.no_grad():
        layer.router.bias[5] = 100.0
    layer(x).sum().backward()
    assert set(layer.router(x.flatten(0, 1))[1].flatten().tolist()) == {5}
    for linear in (layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj):
        unused = [e for e in range(8) if e != 5]
        assert linear.weight.grad[5].abs().max() > 0
        assert torch.equal(linear.weight.grad[unused], torch.zeros_like(linear.weight[unused]))


@pytest.mark.parametrize("spec", [PLAIN_MOE, SPECS["corrected"]], ids=["plain", "groups"])
def test_ties_are_routed_deterministically(spec: MoE) -> None:
    """Each token gets top_k different experts, and always the same ones."""
    layer, x = make_mixture(spec), torch.randn(6, DIM)
    torch.nn.init.zeros_(layer.router.weight)
    if layer.router.selection_bias is not None:
        torch.nn.init.zeros_(layer.router.selection_bias)
    weights, chosen = layer.router(x)
    assert all(len(set(row)) == spec.top_k for row in chosen.tolist())
    assert torch.equal(chosen, chosen[:1].expand_as(chosen))
    assert torch.equal(weights, weights[:1, :1].expand_as(weights))
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("in_fp32", [True, False])
def test_router_dtype(in_fp32: bool) -> None:
    """DeepSeek routes in fp32, others in the dtype of the activations."""
    router, x = Router(DIM, MoE(8, 3, 16, router_in_fp32=in_fp32)), torch.randn(5, DIM).bfloat16()
    torch.nn.init.normal_(router.weight)
    dtype = torch.float32 if in_fp32 else torch.bfloat16
    assert torch.equal(router.logits(x), F.linear(x.to(dtype), router.weight.to(dtype)).float())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_traced_mixture_matches_eager(dtype: torch.dtype) -> None:
    """Compilation without the code generator."""
    layer = make_mixture(MoE(8, 3, 16, shared_intermediate_size=8)).to(dtype)
    traced = torch.compile(layer, backend="aot_eager", dynamic=True)
    for x in (torch.randn(1, 10, 16).to(dtype), torch.randn(1, 8, 16).to(dtype)):
        results = []
        for run in (layer, traced):
            y = run(x)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), layer_weights(layer))])
        for plain, traced_grad in zip(*results, strict=True):
            assert relative_error(traced_grad.float(), plain.float()) < (1e-5 if dtype == torch.float32 else 0.02)


MIXED = ["qwen2-moe-sliding", "gpt-oss", "deepseek-v3", "glm4-moe", "llama4", "gemma4-shared", "gemma4-moe-shared"]


@pytest.mark.parametrize("name", MIXED)
def test_activation_checkpointing_is_bit_exact(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    grads = []
    for recompute in ("none", "full"):
        model = load_model(folder, memory=MemoryConfig(activation_checkpointing=recompute))
        model(random_tokens(), head_fn=lambda hidden, head: head(hidden)).float().square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(grads[1][name], grad) for name, grad in grads[0].items())


@pytest.mark.parametrize("name", MIXED)
def test_packed_documents_match_separate_documents(name: str, tmp_path: Path) -> None:
    model, lengths = load_model(make_checkpoint(tmp_path, name), FrozenModel()), [17, 4, 25]
    row = random_tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    separate = [model(document) for document in row.split(lengths, dim=1)]
    assert relative_error(model(row, positions, SequenceLayout(offsets)), torch.cat(separate, dim=1)) < 1e-5


STACKED = ["mixtral", "olmoe", "granite-moe", "qwen2-moe", "qwen3-moe-sparse", "glm4-moe", "deepseek-v3", "deepseek-v2"]


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_are_read_and_written_back(name: str, tmp_path: Path) -> None:
    """transformers 5 writes this layout with save_original_format=False."""
    model = build(SHAPES[name])
    single, stacked = save(model, tmp_path / "a"), save(model, tmp_path / "b", save_original_format=False)
    assert load_file(stacked / WEIGHTS).keys() != load_file(single / WEIGHTS).keys()
    stacked_model = load_model(stacked, FrozenModel())
    assert torch.equal(stacked_model(random_tokens()), load_model(single, FrozenModel())(random_tokens()))
    assert (save_to(tmp_path / "out", stacked_model, stacked) / WEIGHTS).read_bytes() == (
        stacked / WEIGHTS
    ).read_bytes()


def save_to(out: Path, model: Decoder, source: Path) -> Path:
    with atomic.AtomicDir(out) as folder:
        save_model(folder, model, HFCheckpoint.open(source), quiet=True)
    return out


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_prediction_layers_are_preserved(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", name)
    logits = load_model(source, FrozenModel())(random_tokens())
    tensors = load_file(source / WEIGHTS)
    last = SHAPES[name]["num_hidden_layers"]
    extra = {k.replace("layers.2.", f"layers.{last}."): v + 1 for k, v in tensors.items() if ".layers.2." in k}
    extra |= {f"model.layers.{last}.{part}.weight": torch.randn(3) for part in ("eh_proj", "enorm", "shared_head.norm")}
    save_file(tensors | extra, source / WEIGHTS, metadata={"format": "pt"})
    model = load_model(source, FrozenModel())
    assert torch.equal(model(random_tokens()), logits)
    assert (save_to(tmp_path / "out", model, source) / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_unused_keys_of_shared_kv_layers_are_preserved(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "gemma4-shared")
    tensors = load_file(source / WEIGHTS)
    extra = {
        f"model.layers.{i}.self_attn.{leaf}": torch.randn(5)
        for i in range(4, 8)
        for leaf in ("k_proj.weight", "k_norm.weight")
    }
    save_file(tensors | extra, source / WEIGHTS, metadata={"format": "pt"})
    model = load_model(source, FrozenModel())
    assert relative_error(model(random_tokens()), load_transformers_model(source)(random_tokens()).logits) < 1e-5
    assert (save_to(tmp_path / "out", model, source) / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek-v3")
    spec = HFCheckpoint.open(folder).spec
    rewrite_config(folder, lambda c: c | {"model_type": "kimi_k2"})
    assert HFCheckpoint.open(folder).spec == spec


MXFP4 = SHAPES["gpt-oss"] | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def test_gpt_oss_mxfp4_matches_transformers(tmp_path: Path) -> None:
    folder = save(build(MXFP4).bfloat16(), tmp_path)
    tensors, generator = load_file(folder / WEIGHTS), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        shape = experts, outer, inner // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    rewrite_config(folder, lambda c: c | {"quantization_config": {"quant_method": "mxfp4"}})
    with torch.no_grad():
        ours, theirs = (
            load_model(folder, FrozenModel(), PrecisionConfig("fp32"))(random_tokens()),
            load_transformers_model(folder).float()(random_tokens()).logits,
        )
    assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("frozen", ["checkpoint", "bf16"])
def test_router_weights_stay_fp32(frozen: str, tmp_path: Path) -> None:
    """Published files store selection biases, and some routers, in fp32 next to bf16 weights."""
    model = build(SHAPES["deepseek-v3"]).bfloat16()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if ".mlp.gate." in name:
            tensor.data = tensor.data.float()
    decoder = load_model(save(model, tmp_path), FrozenModel(), PrecisionConfig("bf16", frozen_dtype=frozen))
    kinds = {name: p.dtype for name, p in decoder.named_parameters()}
    fp32_names = {name for name, kind in kinds.items() if kind == torch.float32}
    assert fp32_names == {f"layers.{i}.mlp.router.{leaf}" for i in (1, 2) for leaf in ("weight", "selection_bias")}


@pytest.mark.parametrize("name", [*MIXED, "gemma4-moe"])
def test_all_weights_are_initialized(name: str, tmp_path: Path) -> None:
    """All values are finite, experts differ, and biases and scales have no effect."""
    models = [Decoder(HFCheckpoint.open(make_checkpoint(tmp_path, name)).spec) for _ in range(2)]
    for model in models:
        for p in model.parameters():
            torch.nn.init.constant_(p, float("nan"))
        init_weights(model, 3)
    for (key, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), key
        assert p.isfinite().all(), key
        # Residual projections are smaller by the square root of twice the number of layers.
        assert p.ndim < 2 or p.numel() < 500 or 0.2 < p.std() / models[0].spec.initializer_range < 1.2, key
        if p.ndim == 3:
            assert len({w.sum().item() for w in p}) == len(p)
    assert models[0](random_tokens()).isfinite().all()


@pytest.mark.parametrize(("name", "change", "expected"), [
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok 6 .* 5"),
    ("qwen3-moe", {"num_local_experts": None}, "number of experts is missing"),
    ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit must be a number above 0"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
    ("gemma4-shared", {"num_kv_shared_layers": 7}, "num_kv_shared_layers 7: no full_attention layer"),
])  # fmt: skip
def test_invalid_config_error_names_the_file(name: str, change: dict, expected: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    rewrite_config(folder, lambda c: c | change)
    with pytest.raises(UserError, match=expected) as error:
        HFCheckpoint.open(folder)
    assert str(folder / "config.json") in str(error.value)
