"""Stopped on one layout and gone on with on another, a run takes the same course."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.parallel.ranks import on
from tests.recipes.conftest import sums
from tests.recipes.moved import Stretch, stretches
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.loggers.metric_logger import read_metrics

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
WAYS = {
    # Adam's step is as long where a gradient is nearly zero, and then rounding decides its direction.
    "full": "optimizer: {kind: adamw, lr: 0.05, eps: 0.1}",
    "lora in 8 bits": "adapter: {kind: lora, rank: 4, loraplus_lr_ratio: 4}\noptimizer: {kind: adamw8bit, lr: "
    "0.05, eps: 0.1}",
}


def furthest(found: list[dict], wanted: list[dict]) -> float:
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    names = ("loss", "grad_norm", "lr", "eval/loss")
    pairs = [(a[n], b[n]) for a, b in zip(found, wanted, strict=True) for n in names if n in b]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.multi
@pytest.mark.slow
def test_the_course_is_the_same(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(sums(1, 10))
    (tmp_path / "held.jsonl").write_text(sums(100, 3))

    def part(way: str, out: str, parallel: ParallelConfig, steps: int | None) -> Stretch:
        text = CONFIG.format(model=tiny, folder=tmp_path) + f"{WAYS[way]}\noutput_dir: {tmp_path / way / out}\n"
        return text, parallel, steps

    def on_all(count: int, out: str, parallel: ParallelConfig, steps: int | None) -> None:
        on(count, stretches, [part(way, out, parallel, steps) for way in WAYS], limit=300)

    stretches([part(way, out, ParallelConfig(), n) for way in WAYS for out, n in (("whole", None), ("moved", 2))])
    on_all(4, "moved", ParallelConfig(dp_replicate=2), 2)  # the wish is heard of at the beginning of a step
    on_all(2, "moved", ParallelConfig(tp=2), 2)
    on_all(2, "moved", ParallelConfig(), None)
    for way in WAYS:
        whole, moved = (tmp_path / way / out for out in ("whole", "moved"))
        apart = furthest(read_metrics(moved), read_metrics(whole))
        print(f"{way}: {apart:.1e}")
        assert apart < 1e-6, way
        for file in (whole / "final").glob("*.safetensors"):
            one, other = load_file(file), load_file(moved / "final" / file.name)
            assert one.keys() == other.keys()
            assert max(((other[n] - t).abs().max() / t.abs().max()).item() for n, t in one.items()) < 1e-5
