"""Embedding runs compared with sentence-transformers: the steps of its trainer, and its embeddings of the result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as oracle
from torch import Tensor

from tests.helpers.random_checkpoints import FP32, make_checkpoint, relative_error
from tests.helpers.trl_runs import SHARED_OPTIONS, make_text_generator, step_metrics, write_rows
from tunekit import build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import merge, peft_adapter, sentence_transformers
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.embedding_datasets import RetrievalDataset, SimilarityDataset
from tunekit.distributed.context import DistributedContext
from tunekit.losses.embedding import CoSENT, MultipleNegativesRanking
from tunekit.losses.embedding_metrics import Embedder
from tunekit.memory.config import MemoryConfig
from tunekit.optim.config import SGDConfig
from tunekit.recipes import embed

LR, ROWS = 0.05, 8  # rows of a step
PROMPTS = {"query": "w1 w2 ", "document": "w3 "}


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Texts of 1 to 20 tokens, of which the longest are truncated."""
    random_text = make_text_generator()
    names = ("query", "positive", "negative_1", "negative_2", "sentence1", "sentence2")
    return [{name: random_text(1, 20) for name in names} | {"score": i / ROWS} for i in range(ROWS)]


def make_model(folder: Path, shape: str) -> str:
    """A checkpoint whose words are tokens. transformers would choose the tokenizer class by the model type."""
    config = make_checkpoint(folder / "model", shape) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(folder / "model")


def make_config(folder: Path, rows: list[dict[str, Any]], shape: str = "llama3.2", **changes: Any) -> embed.EmbedConfig:
    prompts = {f"{name}_prompt": text for name, text in PROMPTS.items()}
    cfg = embed.EmbedConfig(
        model=make_model(folder, shape),
        data=RetrievalDataset(write_rows(folder, rows), max_length=16, shuffle=False, **prompts),
        output_dir=str(folder / "run"),
        optimizer=SGDConfig(lr=LR, momentum=0.0),
        **{**SHARED_OPTIONS, "global_batch_size": ROWS, "micro_batch_size": 3, "max_steps": 2, "max_grad_norm": 0},
        data_checks="warn",
    )
    return replace(cfg, **changes)


def open_model(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


def train_theirs(
    model: SentenceTransformer, loss: torch.nn.Module, columns: list[list[str]], labels: Tensor, steps: int
) -> list[float]:
    """Losses of steps of SGD on all rows."""
    optimizer, values = torch.optim.SGD(model.parameters(), LR), []
    model.eval()
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss([model.preprocess(column) for column in columns], labels)
        value.backward()
        optimizer.step()
        values.append(float(value))
    return values


def check_steps(cfg: embed.EmbedConfig, rows: list[dict[str, Any]], theirs: Any, folder: Path) -> None:
    """Losses and final weights of a run equal those of sentence-transformers."""
    embed.main(replace(cfg, output_dir=str(folder / "start"), optimizer=SGDConfig(lr=1e-30), max_steps=1))
    model = open_model(folder / "start" / "final")
    if isinstance(cfg.data, SimilarityDataset):
        columns = [[row[name] for row in rows] for name in ("sentence1", "sentence2")]
    else:
        texts = [("query", "query"), *(("document", n) for n in ("positive", "negative_1", "negative_2"))]
        columns = [[PROMPTS[prompt] + row[name] for row in rows] for prompt, name in texts]
    labels = torch.tensor([row["score"] for row in rows])
    expected = train_theirs(model, theirs(model), columns, labels, 2)
    embed.main(cfg)
    actual = [line["loss"] for line in step_metrics(cfg.output_dir)]
    assert actual == pytest.approx(expected, rel=1e-5) and abs(expected[0] - expected[1]) > 1e-3
    tensors = open_model(folder / "run" / "final").state_dict()
    for name, tensor in model.state_dict().items():
        assert relative_error(tensors[name], tensor) < 3e-5, name


@pytest.mark.parametrize("cached", [False, True])
def test_steps_with_negatives_match(cached: bool, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Micro-batches of 3 rows give the gradients of all rows at once, as the cached loss does."""
    cfg = make_config(tmp_path, rows, loss=MultipleNegativesRanking(scale=5.0), pooling="mean")
    if cached:
        check_steps(cfg, rows, lambda m: oracle.CachedMultipleNegativesRankingLoss(m, 5.0, mini_batch_size=2), tmp_path)
    else:
        check_steps(cfg, rows, lambda m: oracle.MultipleNegativesRankingLoss(m, 5.0), tmp_path)


def test_matryoshka_steps_on_packed_rows_match(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    cfg = make_config(tmp_path, rows, pooling="lasttoken")
    loss = MultipleNegativesRanking(matryoshka_dims=(cfg_dim(cfg), 8), matryoshka_weights=(1.0, 0.5))
    cfg = replace(cfg, loss=loss, data=replace(cfg.data, packing=True, max_length=32), global_batch_size=64)
    inner = oracle.MultipleNegativesRankingLoss
    check_steps(cfg, rows, lambda m: oracle.MatryoshkaLoss(m, inner(m), [cfg_dim(cfg), 8], [1.0, 0.5]), tmp_path)


def cfg_dim(cfg: embed.EmbedConfig) -> int:
    return build.read_checkpoint(cfg).spec.dim


def test_steps_on_scored_pairs_match(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    data = SimilarityDataset(write_rows(tmp_path, rows), max_length=16)
    base = make_config(tmp_path, rows)
    cfg = replace(base, data=data, loss=CoSENT(), pooling="mean")
    check_steps(cfg, rows, oracle.CoSENTLoss, tmp_path)


def our_embeddings(folder: Path, cfg: embed.EmbedConfig) -> Tensor:
    """Embeddings (rows, documents per row, dim) of the training rows by a saved model or adapter."""
    checkpoint, adapter, tokenizer = build.resolve_model(str(folder))
    dist = DistributedContext(device="cpu")
    model = build.build_model(checkpoint, cfg.quantization, adapter, FP32, MemoryConfig(), dist)
    data = build_dataloader(cfg.data, tokenizer, ROWS, ROWS, dist)
    (batch,) = data[0]
    pooling = sentence_transformers.choose_pooling(None, folder)
    assert pooling is not None
    with torch.no_grad():
        embeddings = Embedder(model.eval(), pooling, dist)(batch)
    return embeddings[batch.documents.indices.argsort()].view(ROWS, -1, model.spec.dim)


def check_result(folder: Path, ours: Tensor, rows: list[dict[str, Any]]) -> SentenceTransformer:
    """sentence-transformers embeds queries and documents with the saved prompts, as we do."""
    model = open_model(folder)
    queries = model.encode_query([row["query"] for row in rows], convert_to_tensor=True)
    documents = model.encode_document([row["negative_2"] for row in rows], convert_to_tensor=True)
    assert relative_error(queries, ours[:, 0]) < 3e-5 and relative_error(documents, ours[:, 3]) < 1e-5
    return model


# One checkpoint of each kind of names and attention: tied or not, fused, with experts, multimodal.
FAMILIES = ("llama3.1", "gemma2", "qwen3", "mistral", "gemma3", "phi3", "glm4", "olmo2", "granite", "qwen3-moe")


@pytest.mark.parametrize("shape", FAMILIES)
def test_result_opens_in_sentence_transformers(shape: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    pooling = ("lasttoken", "mean", "cls")[FAMILIES.index(shape) % 3]
    cfg = make_config(tmp_path, rows, shape, pooling=pooling, max_steps=1, normalize=False)
    embed.main(cfg)
    final = tmp_path / "run" / "final"
    model = check_result(final, our_embeddings(final, cfg), rows)
    assert model[0].model.config.architectures == [type(model[0].model).__name__]
    names = HFCheckpoint.open(final).tensors
    assert names and not any("lm_head" in name for name in names)


def test_adapter_and_its_merge_open_in_sentence_transformers(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The adapter has the names of a model without a head. Training continues from it, with its pooling."""
    cfg = make_config(tmp_path, rows, "qwen3", adapter=LoRAConfig(4), pooling="mean", normalize=False)
    embed.main(cfg)
    final, base = tmp_path / "run" / "final", tmp_path / "model"
    ours = our_embeddings(final, cfg)
    check_result(final, ours, rows)
    source = peft_adapter.with_adapter_config(AdapterDir.open(final), HFCheckpoint.open(base))
    (tmp_path / "merged").mkdir()
    merge.merge_adapter(source, source.open_adapter(final), tmp_path / "merged", quiet=True)
    check_result(tmp_path / "merged", ours, rows)
    second = replace(cfg, model=str(final), pooling=None, output_dir=str(tmp_path / "second"), max_steps=1)
    embed.main(second.continue_adapter())
    assert sentence_transformers.choose_pooling(None, tmp_path / "second" / "final") == "mean"


def test_training_continues_from_an_embedding_model(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """A model that sentence-transformers saved has no head and other tensor names, which are kept."""
    cfg = make_config(tmp_path, rows, "llama3.1", pooling="mean", max_steps=1)
    embed.main(cfg)
    open_model(tmp_path / "run" / "final").save(str(tmp_path / "saved"))
    second = replace(cfg, model=str(tmp_path / "saved"), pooling=None, output_dir=str(tmp_path / "second"), max_steps=2)
    embed.main(second)
    final = tmp_path / "second" / "final"
    assert sentence_transformers.choose_pooling(None, final) == "mean"
    assert HFCheckpoint.open(final).tensors.keys() == HFCheckpoint.open(tmp_path / "saved").tensors.keys()
    ours = torch.nn.functional.normalize(our_embeddings(final, second), dim=-1)
    check_result(final, ours, rows)
