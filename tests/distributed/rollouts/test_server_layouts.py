"""Rollouts from a server on two ranks: ranks with the same rows share responses, and one adapter serves all."""

from pathlib import Path

from tests.distributed.rollouts.test_episode_layouts import LAYOUTS as ALL_LAYOUTS
from tests.distributed.rollouts.test_episode_layouts import save_model
from tests.helpers.completion_server import answer_tokens, run_server
from tests.helpers.ranks import run_ranks
from tunekit import build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.generation.requests import GenerationRequest
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization
from tunekit.rollouts.openai_client import OpenAIClient
from tunekit.rollouts.served_model import ServedAdapter
from tunekit.rollouts.server_engine import ServerEngine

SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=4)
LORA = LoRAConfig(rank=2)
LAYOUTS = {name: ALL_LAYOUTS[name] for name in ("replicated", "tensor")}


def sample(url: str, model_path: str, directory: str) -> dict[str, tuple[dict[str, list[int]], str]]:
    """Answers of this rank, and the error for a request that the server refuses, by layout."""
    results = {}
    for name, parallel in LAYOUTS.items():
        with DistributedContext(0, "cpu", parallel) as dist:
            checkpoint = HFCheckpoint.open(Path(model_path), model_path)
            model = build.build_model(checkpoint, NoQuantization(), LORA, PrecisionConfig(), MemoryConfig(), dist)
            client = OpenAIClient("engine", url, "NO_KEY", 30, 0)
            served = ServedAdapter(client, "base", Path(directory), LORA, checkpoint, dist)
            engine = ServerEngine(served, model, 2, 32, dist)
            engine.check([1])
            engine.sync_weights()
            rows = range(dist.dp_rank, 5, dist.dims.dp_size)
            requests = [GenerationRequest(f"{name} {row}", [row + 1], SAMPLING) for row in rows]
            answers = {key: [item.token for item in value] for key, value in engine.generate(requests).items()}
            error = ""
            if name == "tensor":
                try:
                    engine.generate([GenerationRequest("refused", [400], SAMPLING)])
                except UserError as problem:
                    error = str(problem)
                engine.abort("refused")
            engine.sleep()
            results[name] = answers, error
    return results


def test_ranks_share_the_server(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model")
    with run_server() as server:
        server.refused_tokens = {400}
        ranks = run_ranks(2, sample, server.url, str(tmp_path / "model"), str(tmp_path / "adapters"))
        assert [*server.models] == ["base"] and len(server.loaded) == 2 * len(LAYOUTS)
        bodies = [body for body in server.completions if body["max_tokens"] == 4]
    expected = {(*body["prompt"],): answer_tokens(body["prompt"], body["seed"], 4) for body in bodies}
    assert len(bodies) == 5 * len(LAYOUTS) + 1, "each row is requested once, also by tensor parallel ranks"
    for name in LAYOUTS:
        both = [rank[name][0] for rank in ranks]
        counts = [5, 5] if name == "tensor" else [3, 2]
        assert [len(answers) for answers in both] == counts
    assert ranks[0]["tensor"][0] == ranks[1]["tensor"][0]
    assert all("refused token" in rank["tensor"][1] for rank in ranks), "the error of one rank is raised on all"
    for row in range(5):
        assert ranks[0]["tensor"][0][f"tensor {row}"] in expected.values()
