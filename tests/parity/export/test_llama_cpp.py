"""llama.cpp, if installed, opens exported files and gives the same tokens and logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_models import (
    SUPPORTED,
    TEXT,
    export_checkpoint,
    make_checkpoint,
    regex_pre_tokenizer,
    write_byte_level_bpe,
    write_sentencepiece,
)
from tests.helpers.random_checkpoints import FP32, random_tokens
from tunekit import assets, build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint import verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import LazyLogits, ModelSource, checkpoint_logits
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.export.gguf_export import export_gguf
from tunekit.export.pretokenizer import PRE_TOKENIZERS
from tunekit.export.tokenizer import TEXTS, read_vocabulary
from tunekit.generation import generate
from tunekit.generation.sampling import SamplingConfig

llama_cpp: Any = pytest.importorskip("llama_cpp")
CPU = torch.device("cpu")
NANO = assets.MODELS["tunekit/nano"]
# llama.cpp computes gelu with an fp16 table.
GELU = {"gemma", "gemma2", "gemma3", "gemma3-mixed"}
# Mean and largest difference, in standard deviations of the logits.
MAX_DIFFERENCE = {
    "f32": (1e-5, 1e-3),
    "f16": (0.002, 0.1),
    "bf16": (0.01, 0.3),
    "q8_0": (0.05, 2.0),
    "q4_0": (0.4, 10.0),
}


def open_llama(path: Path, **options: Any) -> Any:
    defaults = {"n_ctx": 256, "verbose": False, "n_threads": 1, "logits_all": True}
    return llama_cpp.Llama(str(path), **(defaults | options))


def llama_logits(path: Path, rows: list[list[int]]) -> Tensor:
    """Logits after each token, with fp32 keys and values."""
    model = open_llama(path, type_k=0, type_v=0, flash_attn=False)
    row_logits = []
    for row in rows:
        model.reset()
        model.eval(row)
        row_logits.append(torch.from_numpy(np.array(model.scores[: len(row)])))
    model.close()
    logits = torch.cat(row_logits)
    return LazyLogits(logits.shape[1], lambda columns: logits[:, columns])


@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_equal_tunekit(name: str, tmp_path: Path) -> None:
    directory, out = make_checkpoint(tmp_path / "model", SUPPORTED[name]), tmp_path / "model.gguf"
    gguf_plan, _ = export_checkpoint(directory, out)
    rows = random_tokens(length=min(40, gguf_plan.spec.context)).tolist()
    expected = checkpoint_logits(ModelSource(HFCheckpoint.open(directory)), rows, CPU)
    largest, mean, top1, _ = verify.logit_diffs([expected], llama_logits(out, rows))[0]
    assert mean < (1e-3 if name in GELU else 1e-5) and largest < (0.1 if name in GELU else 1e-3) and top1 == 1.0


@pytest.fixture(scope="module", params=MAX_DIFFERENCE)
def nano(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The bundled model as a file of each type."""
    path = tmp_path_factory.mktemp("nano") / "nano.gguf"
    export_gguf(HFCheckpoint.open(NANO), FrozenModel(), Tokenizer.open(NANO), path, request.param, "x")
    return request.param, path


def test_logits_of_the_nano_model(nano: tuple[str, Path]) -> None:
    """llama.cpp computes matmuls of fp16 and smaller types in lower precision too."""
    quant_type, path = nano
    source = HFCheckpoint.open(NANO)
    rows = verify.probe_prompts(NANO, source.spec)
    expected = checkpoint_logits(ModelSource(source), rows, CPU)
    largest, mean, *_ = verify.logit_diffs([expected], llama_logits(path, rows))[0]
    assert mean < MAX_DIFFERENCE[quant_type][0] and largest < MAX_DIFFERENCE[quant_type][1]


def test_answer_of_the_nano_model_is_the_same(nano: tuple[str, Path]) -> None:
    quant_type, path = nano
    if quant_type not in ("f32", "f16", "bf16"):
        pytest.skip("4-bit and 8-bit weights change the answer")
    model, tokenizer = build.load_for_inference("tunekit/nano", FP32, DistributedContext(0, "cpu"))
    question = [{"role": "user", "content": "What is 3 plus 4?"}]
    llama = open_llama(path)
    answer = llama.create_chat_completion(question, temperature=0.0, max_tokens=24)["choices"][0]["message"]["content"]
    llama.close()
    assert (
        answer.strip()
        == "".join(generate.stream_text(model, tokenizer, question, SamplingConfig(0.0, max_new_tokens=24))).strip()
    )


@pytest.mark.parametrize("kind", [*PRE_TOKENIZERS, "always", "never", "first"])
def test_tokens_equal_llama_cpp(kind: str, tmp_path: Path) -> None:
    """Predicted tokens, which are checked before a file is written, equal those of llama.cpp."""
    directory = make_checkpoint(tmp_path / "model", SUPPORTED["qwen3"] | {"vocab_size": 448})
    if kind in PRE_TOKENIZERS:
        write_byte_level_bpe(
            directory, regex_pre_tokenizer(*PRE_TOKENIZERS[kind].patterns), PRE_TOKENIZERS[kind].ignore_merges
        )
    else:
        write_sentencepiece(directory, kind)
    out, tokenizer = tmp_path / "model.gguf", Tokenizer.open(directory)
    export_gguf(HFCheckpoint.open(directory), FrozenModel(), tokenizer, out, None, "x")
    model, (vocabulary, _) = open_llama(out), read_vocabulary(tokenizer, 448, "x")
    texts = [*TEXTS, *TEXT, "a<turn> b <begin>c", "\t x", " 'Re's 12345 "]
    token_ids = [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    assert token_ids == vocabulary.encode(texts)
    with_bos = model.tokenize(b"fox", add_bos=True, special=True)
    assert with_bos == tokenizer.encode("fox", special=True)
    model.close()
