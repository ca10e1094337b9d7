"""A run that is stopped on one layout and resumed on another gives the same result."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_runs import addition_rows
from tests.helpers.run_segments import RunSegment, run_segments
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.loggers.metrics_file import read_metrics

CONFIG = """\
model: {model}
data: {{kind: chat, source: {folder}/rows.jsonl, max_length: 64}}
eval_data: {{kind: chat, source: {folder}/held.jsonl, max_length: 64}}
precision: {{compute_dtype: fp32}}
device: cpu
global_batch_size: 4
micro_batch_size: 1
max_steps: 10
eval_every: 5
"""
METHODS = {
    # Adam amplifies gradients near zero, whose direction is rounding error.
    "full": "optimizer: {kind: adamw, lr: 0.05, eps: 0.1}",
    "lora in 8 bits": "adapter: {kind: lora, rank: 4, loraplus_lr_ratio: 4}\noptimizer: {kind: adamw8bit, lr: "
    "0.05, eps: 0.1}",
}


def max_relative_difference(actual: list[dict], expected: list[dict]) -> float:
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    names = ("loss", "grad_norm", "lr", "eval/loss")
    pairs = [(a[n], b[n]) for a, b in zip(actual, expected, strict=True) for n in names if n in b]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.multi
@pytest.mark.slow
def test_run_that_changes_its_layout_gives_the_same_result(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(addition_rows(1, 10))
    (tmp_path / "held.jsonl").write_text(addition_rows(100, 3))

    def make_segment(method: str, out: str, parallel: ParallelConfig, steps: int | None) -> RunSegment:
        text = (
            CONFIG.format(model=tiny_model, folder=tmp_path)
            + f"{METHODS[method]}\noutput_dir: {tmp_path / method / out}\n"
        )
        return text, parallel, steps

    def run_segment(count: int, out: str, parallel: ParallelConfig, steps: int | None) -> None:
        run_ranks(count, run_segments, [make_segment(method, out, parallel, steps) for method in METHODS], limit=300)

    run_segments(
        [
            make_segment(method, out, ParallelConfig(), n)
            for method in METHODS
            for out, n in (("whole", None), ("moved", 2))
        ]
    )
    run_segment(4, "moved", ParallelConfig(dp_replicate=2), 2)  # the signal is handled at the start of a step
    run_segment(2, "moved", ParallelConfig(tp=2), 2)
    run_segment(2, "moved", ParallelConfig(), None)
    for method in METHODS:
        unbroken, moved = (tmp_path / method / out for out in ("whole", "moved"))
        difference = max_relative_difference(read_metrics(moved), read_metrics(unbroken))
        print(f"{method}: {difference:.1e}")
        assert difference < 1e-6, method
        for file in (unbroken / "final").glob("*.safetensors"):
            expected, actual = load_file(file), load_file(moved / "final" / file.name)
            assert expected.keys() == actual.keys()
            assert max(((actual[n] - t).abs().max() / t.abs().max()).item() for n, t in expected.items()) < 1e-5
