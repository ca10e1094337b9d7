"""Noise on the input embeddings (NEFTune) equals that of transformers, and is only added in training."""

from pathlib import Path

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from tests.helpers.compare_layouts import make_checkpoint_dir
from tests.helpers.random_checkpoints import load_model, load_transformers_model, make_checkpoint, random_tokens
from tests.helpers.ranks import run_ranks
from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization


@pytest.mark.parametrize("name", ["llama3.2", "qwen3-biases", "granite"])
def test_noise_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    model, reference = load_model(folder).train(), load_transformers_model(folder).train()
    clean = model(random_tokens())
    model.neftune_noise_alpha = 5.0
    embedding = reference.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    logits = []
    for run in (model, lambda tokens: reference(tokens).logits, model):
        torch.manual_seed(3)
        logits.append(run(random_tokens()))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[0], logits[2]), "the same seed draws the same noise"
    assert (logits[0] - clean).abs().max() > 1e-2
    with torch.no_grad():
        assert torch.equal(model(random_tokens()), clean), "no noise without gradients"
    assert torch.equal(model.eval()(random_tokens()), clean), "no noise in evaluation"


def noisy_logits(folder: Path, parallel: ParallelConfig) -> torch.Tensor:
    torch.set_num_threads(1)
    fp32 = PrecisionConfig("fp32", "fp32", "fp32")
    with DistributedContext(7, "cpu", parallel) as dist:
        source = HFCheckpoint.open(folder)
        model = build.build_model(source, NoQuantization(), NoAdapter(), fp32, MemoryConfig(), dist).train()
        model.neftune_noise_alpha = 5.0
        dist.seed_step(3)
        return model(torch.arange(14).view(2, 7)).detach()


@pytest.mark.multi
def test_tensor_parallel_ranks_draw_the_noise_of_one_process(tmp_path: Path) -> None:
    folder = make_checkpoint_dir(tmp_path, "dense")
    expected = noisy_logits(folder, ParallelConfig())
    for logits in run_ranks(2, noisy_logits, folder, ParallelConfig(tp=2)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
