"""Embedding runs: config and row errors, metrics, resuming, the bundled example, and rerankers."""

import json
from pathlib import Path

import pytest

from tests.helpers.recipe_runs import SHARED_CONFIG, Workspace
from tests.recipes.test_resume import stop_after
from tunekit.loggers import metrics_file

CONFIG = """\
recipe: embed
model: {model}
data: {{source: triplets.jsonl, max_length: 32}}
eval_data: {{source: triplets_held.jsonl, max_length: 32}}
optimizer: {{kind: adamw, lr: 1e-2}}
max_steps: 5
"""
RUN = ("run", "embed", "embed.yaml")
SIMILARITY = ("data={kind: similarity, source: scored.jsonl}", "eval_data={kind: similarity, source: scored.jsonl}")


def write_lines(name: str, rows: list[dict[str, object]]) -> None:
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def embed_workspace(workspace: Workspace) -> Workspace:
    """Workspace with `embed.yaml` and rows of each kind."""
    for name, numbers in (("triplets", range(1, 17)), ("triplets_held", range(30, 40))):
        rows = [{"anchor": f"What is {n} plus 1?", "positive": f"{n + 1}", "negative": f"It is {n}"} for n in numbers]
        write_lines(name, rows)
    write_lines("scored", [{"sentence1": f"{n} cats", "sentence2": f"{n * n} dogs", "score": n / 9} for n in range(10)])
    write_lines("uneven", [{"query": "a", "positive": "b", "negative": ["c", "d"]}, {"query": "a", "positive": "b"}])
    pairs = [{"query": f"What is {n}?", "positive": f"It is {n}"} for n in range(3)]
    write_lines("pairs", pairs)
    write_lines("late", [pairs[0], *({**pair, "neg": ["c"]} for pair in pairs[1:])])
    write_lines("null", [{"query": "a", "positive": "b"}, {"query": "c", "positive": None}])
    write_lines("stars", [{"sentence1": f"{n} cats", "sentence2": f"{n} dogs", "score": n} for n in (0, 1, 5, 4)])
    write_lines("words", [{"sentence1": "a", "sentence2": "b", "score": "high"}])
    Path("embed.yaml").write_text((CONFIG + SHARED_CONFIG).format(model=workspace.model))
    return workspace


@pytest.mark.parametrize(("changes", "message"), [
    (("data.source=scored.jsonl",), "scored.jsonl: the row has no column 'query'"),
    (("data.source=scored.jsonl",), "or `kind: similarity` and `loss: cosent`"),
    (("data.columns.query=title",), "no column 'title'"),
    (("data.columns.negative=title",), "no column 'title'"),
    (("data.source=late.jsonl", "eval_data=null"), "2 of 3 rows (67%) have more hard negatives than are used"),
    (("data.source=pairs.jsonl", "global_batch_size=1", "micro_batch_size=1"), "global_batch_size: no negatives"),
    (("data.source=uneven.jsonl",), "uneven.jsonl:2: negative: "),
    (("data.num_negatives=2",), "negative: the row has 1 hard negatives"),
    (("data.num_negatives=-1",), "data.num_negatives: "),
    (("data.source=null.jsonl",), "null.jsonl:2: positive: "),
    (("data={kind: similarity, source: words.jsonl}", "loss=cosent", "eval_data=null"), "score: must be a number"),
    (("data={kind: similarity, source: stars.jsonl}", "loss=cosine_similarity", "eval_data=null"), "score 5 is not"),
    (SIMILARITY, "data: loss=multiple_negatives_ranking needs retrieval rows"),
    (("loss=cosent",), "Set data.kind=similarity, or loss=multiple_negatives_ranking"),
    (("loss.matryoshka_dims=[9999]",), "loss.matryoshka_dims: must be at most"),
    (("loss.matryoshka_dims=[8]", "loss.matryoshka_weights=[1,2]"), "loss.matryoshka_weights: "),
    (("loss.scale=0",), "loss.scale: "),
    (("loss.temperature=0.05",), "use loss.scale: 1 / temperature"),
    (("loss.directions=[doc_to_query]",), "loss.directions: "),
    (("loss.directions=[query_to_doc,doc_to_doc]", "loss.partition_mode=per_direction"), "loss.partition_mode: "),
    (("gather_across_devices=true",), "gather_across_devices: "),
    (("mini_batch_size=2",), "use micro_batch_size"),
    (("pooling=max",), "pooling: "),
    (("parallel.tp=2",), "parallel.tp: "),
    (("forgetting.data.source=scored.jsonl",), "forgetting: "),
    (("neftune_noise_alpha=5",), "neftune_noise_alpha: "),
    (("metric_for_best_model=ndcg", "load_best_model_at_end=true"), "Use one of loss, cosine_accuracy@1"),
])  # fmt: skip
def test_errors_name_the_key_or_row(changes: tuple[str, ...], message: str, embed_workspace: Workspace) -> None:
    result = embed_workspace.run_tune(*RUN, *changes)
    assert result.code == 2
    assert message in result.err and "Traceback" not in result.err


def test_preview_shows_the_negatives_that_are_used(embed_workspace: Workspace) -> None:
    for changes, count in ((), 2), (("data.num_negatives=0",), 2), (("data.source=triplets.jsonl",), 3):
        result = embed_workspace.run_tune("data", "embed.yaml", "data.source=late.jsonl", *changes, "--row=2", "--json")
        report = json.loads(result.out)
        assert len(report["rows"][0]["spans"]) == count
        severities = [finding["severity"] for finding in report["findings"] if finding["kind"] == "negatives unused"]
        assert severities == (["doubtful"] if "data.num_negatives=0" in changes else ["wrong"] if count == 2 else [])


@pytest.mark.parametrize("changes", [
    ("adapter={kind: lora, rank: 4, dropout: 0.2}", "pooling=mean"),
    ("micro_batch_size=4", "data.packing=true"),
    (*SIMILARITY, "loss={kind: cosent, matryoshka_dims: [16, 8]}", "data_checks=warn"),
])  # fmt: skip
def test_stopped_run_resumes_bit_exactly(
    changes: tuple[str, ...], embed_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert embed_workspace.run_tune(*RUN, *changes, "output_dir=whole").code == 0
    stop_after(monkeypatch, 2)
    assert embed_workspace.run_tune(*RUN, *changes, "output_dir=stopped").code == 143
    assert embed_workspace.run_tune(*RUN, *changes, "output_dir=stopped").code == 0
    assert embed_workspace.is_same_run("stopped", "whole")


def test_dropout_is_the_same_in_both_passes(embed_workspace: Workspace) -> None:
    """Micro-batches of one step are embedded twice. Their gradients are those of one micro-batch with this dropout."""
    losses = []
    for size in (2, 4):
        changes = ("adapter={kind: lora, rank: 4, dropout: 0.5}", f"micro_batch_size={size}", f"output_dir=size{size}")
        assert embed_workspace.run_tune(*RUN, *changes, "optimizer={kind: sgd, lr: 0.01}").code == 0
        losses.append([line["loss"] for line in metrics_file.read_metrics(Path(f"size{size}")) if "loss" in line])
    assert len(losses[0]) == 5 and losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    card = Path("size2/final/README.md").read_text()
    assert f"`{embed_workspace.model.name}` is the directory of the base." in card


def test_metrics_and_best_model(embed_workspace: Workspace) -> None:
    options = ("load_best_model_at_end=true", "metric_for_best_model=cosine_ndcg@10", "eval_every=1")
    result = embed_workspace.run_tune(*RUN, *options)
    assert result.code == 0
    evaluations = [line for line in metrics_file.read_metrics(Path("out")) if "eval/loss" in line]
    best = max(evaluations[1:], key=lambda line: line["eval/cosine_ndcg@10"])
    assert best["step"] == 5 or f"after step {best['step']}. The result has the weights of this step" in result.err
    card = Path("out/final/README.md").read_text()
    assert "SentenceTransformer(" in card and "NDCG@10" in card and "library_name: sentence-transformers" in card


def test_embedding_model_cannot_generate(embed_workspace: Workspace) -> None:
    assert embed_workspace.run_tune(*RUN, "max_steps=1").code == 0
    for args in (("run", "sft", "sft.yaml", "output_dir=sft"), ("run", "generate", "nano/generate")):
        result = embed_workspace.run_tune(*args, "model=out/final")
        assert result.code == 2 and "embedding model without a language model head" in result.err


@pytest.mark.slow
def test_bundled_example_learns(workspace: Workspace) -> None:
    """Held-out facts are found among 400, of which half differ from the right one in a single word."""
    args = ("max_steps=20", "eval_every=20", "output_dir=out")
    assert workspace.run_tune("run", "embed", "nano/embed", *args).code == 0
    first, *_, last = (line for line in metrics_file.read_metrics(Path("out")) if "eval/loss" in line)
    assert first["eval/cosine_accuracy@1"] < 0.1 and last["eval/cosine_accuracy@1"] > 0.9
