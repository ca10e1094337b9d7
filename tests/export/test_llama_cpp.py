"""llama.cpp itself, where it is installed: it opens the files, cuts texts alike and comes to the same logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import FP32, tokens
from tests.export.exported import FITTING, TEXT, made, split, write_bytes, write_pieces, written
from tunekit import assets, build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint import layerwise_forward, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.export.gguf_export import export
from tunekit.export.pretokenizer import PRE
from tunekit.export.tokenizer import TEXTS, read_vocabulary
from tunekit.generation import generate

llama_cpp: Any = pytest.importorskip("llama_cpp")
CPU = torch.device("cpu")
NANO = assets.MODELS["tunekit/nano"]
# Its gelu is a table of fp16.
GELU = {"gemma", "gemma2", "gemma3", "gemma3-mixed"}
# Mean and largest difference, in standard deviations of the logits.
NEAR = {"f32": (1e-5, 1e-3), "f16": (0.002, 0.1), "bf16": (0.01, 0.3), "q8_0": (0.05, 2.0), "q4_0": (0.4, 10.0)}


def opened(file: Path, **options: Any) -> Any:
    plain = {"n_ctx": 256, "verbose": False, "n_threads": 1, "logits_all": True}
    return llama_cpp.Llama(str(file), **(plain | options))


def asked(file: Path, rows: list[list[int]]) -> Tensor:
    """Logits behind every token, with keys and values in fp32."""
    model = opened(file, type_k=0, type_v=0, flash_attn=False)
    found = []
    for row in rows:
        model.reset()
        model.eval(row)
        found.append(torch.from_numpy(np.array(model.scores[: len(row)])))
    model.close()
    whole = torch.cat(found)
    return layerwise_forward.LazyLogits(whole.shape[1], lambda some: whole[:, some])


@pytest.mark.parametrize("name", FITTING)
def test_logits(name: str, tmp_path: Path) -> None:
    folder, out = made(tmp_path / "model", FITTING[name]), tmp_path / "model.gguf"
    plan, _ = written(folder, out)
    rows = tokens(length=min(40, plan.spec.context)).tolist()
    wanted = layerwise_forward.checkpoint_logits(HFCheckpoint.open(folder), FrozenModel(), rows, FP32, CPU)
    largest, mean, top1, _ = verify.distances([wanted], asked(out, rows))[0]
    assert mean < (1e-3 if name in GELU else 1e-5) and largest < (0.1 if name in GELU else 1e-3) and top1 == 1.0


@pytest.fixture(scope="module", params=NEAR)
def nano(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The bundled model as a file of each type."""
    out = tmp_path_factory.mktemp("nano") / "nano.gguf"
    export(HFCheckpoint.open(NANO), FrozenModel(), Tokenizer.open(NANO), out, request.param, "x")
    return request.param, out


def test_the_nano(nano: tuple[str, Path]) -> None:
    """fp16 and smaller types lose something in its products, too."""
    word, file = nano
    source = HFCheckpoint.open(NANO)
    rows = verify.probe_prompts(NANO, source.spec)
    wanted = layerwise_forward.checkpoint_logits(source, FrozenModel(), rows, FP32, CPU)
    largest, mean, *_ = verify.distances([wanted], asked(file, rows))[0]
    assert mean < NEAR[word][0] and largest < NEAR[word][1]


def test_the_nano_answers_alike(nano: tuple[str, Path]) -> None:
    word, file = nano
    if word not in ("f32", "f16", "bf16"):
        pytest.skip("a few bits decide other words")
    model, tokenizer = build.load_for_inference("tunekit/nano", FP32, DistributedContext(0, "cpu"))
    question = [{"role": "user", "content": "What is 3 plus 4?"}]
    theirs = opened(file)
    answer = theirs.create_chat_completion(question, temperature=0.0, max_tokens=24)["choices"][0]["message"]["content"]
    theirs.close()
    assert (
        answer.strip()
        == "".join(
            generate.stream_text(model, tokenizer, question, generate.SamplingConfig(0.0, max_new_tokens=24))
        ).strip()
    )


@pytest.mark.parametrize("kind", [*PRE, "always", "never", "first"])
def test_tokens(kind: str, tmp_path: Path) -> None:
    """What is said of its tokens, and tested before a file is written, is what it does."""
    folder = made(tmp_path / "model", FITTING["qwen3"] | {"vocab_size": 448})
    if kind in PRE:
        write_bytes(folder, split(*PRE[kind].patterns), PRE[kind].whole)
    else:
        write_pieces(folder, kind)
    out, tokenizer = tmp_path / "model.gguf", Tokenizer.open(folder)
    export(HFCheckpoint.open(folder), FrozenModel(), tokenizer, out, None, "x")
    model, (words, _) = opened(out), read_vocabulary(tokenizer, 448, "x")
    texts = [*TEXTS, *TEXT, "a<turn> b <begin>c", "\t x", " 'Re's 12345 "]
    found = [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    assert found == words.encode(texts)
    around = model.tokenize(b"fox", add_bos=True, special=True)
    assert around == tokenizer.encode("fox", special=True)
    model.close()
