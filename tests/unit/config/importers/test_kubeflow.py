"""TrainJobs of Kubeflow with the builtin trainer of torchtune."""

import pytest
import yaml

from tests.unit.config.importers.conftest import Import, values
from tunekit.errors import UserError

JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: fine-tune}
spec:
  runtimeRef: {name: torchtune-llama3.2-1b}
  initializer:
    dataset: {storageUri: hf://owner/questions/data}
    model: {storageUri: hf://meta-llama/Llama-3.2-1B-Instruct, secretRef: {name: token}}
  trainer:
    numNodes: 2
    resourcesPerNode: {limits: {nvidia.com/gpu: 4}}
    args:
      - batch_size=8
      - epochs=2
      - model.lora_rank=16
      - model.lora_alpha=32
      - dataset.source=parquet
      - dataset.data_dir=/workspace/dataset/data
      - "dataset.column_map={input: question, output: answer}"
      - dataset.split=train[:1000]
"""


def test_train_job(import_text: Import) -> None:
    result = import_text(JOB)
    assert (result.trainer, result.draft.recipe) == ("kubeflow", "sft")
    assert values(result, "model", "adapter.rank", "epochs") == ["meta-llama/Llama-3.2-1B-Instruct", 16, 2]
    assert values(result, "global_batch_size", "data.source", "data.split") == [
        8 * 8 * 8,
        "hf://datasets/owner/questions/data",
        "train[:1000]",
    ]
    assert result.draft.get("data.columns") == {"prompt": "question", "input": None, "completion": "answer"}
    assert not [finding for finding in result.draft.findings if finding.effect == "not mapped"]


def test_full_fine_tuning_and_other_runtimes(import_text: Import) -> None:
    job = yaml.safe_load(JOB)
    job["spec"]["trainer"]["args"] = ["batch_size=8", "loss=torchtune.modules.loss.CEWithChunkedOutputLoss"]
    assert import_text(yaml.safe_dump(job)).draft.get("adapter") is None
    job["spec"]["runtimeRef"]["name"] = "torch-distributed"
    with pytest.raises(UserError, match="no builtin trainer"):
        import_text(yaml.safe_dump(job))


def test_sources_outside_the_hub_are_reported(import_text: Import) -> None:
    job = yaml.safe_load(JOB)
    job["spec"]["initializer"] = {"dataset": {"storageUri": "s3://rows/data"}, "model": {"storageUri": "pvc://c/m"}}
    result = import_text(yaml.safe_dump(job))
    assert values(result, "model", "data.source") == ["meta-llama/Llama-3.2-1B-Instruct", "s3://rows/data"]
    dropped = {finding.value for finding in result.draft.findings if finding.effect == "not mapped"}
    assert dropped == {"pvc://c/m", "s3://rows/data"}


@pytest.mark.parametrize(
    ("runtime", "model"),
    [
        ("torchtune-llama3.2-3b", "meta-llama/Llama-3.2-3B-Instruct"),
        ("torchtune-qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"),
    ],
)
def test_runtimes_name_a_model(runtime: str, model: str, import_text: Import) -> None:
    job = yaml.safe_load(JOB)
    del job["spec"]["initializer"]["model"]
    job["spec"]["runtimeRef"]["name"] = runtime
    assert import_text(yaml.safe_dump(job)).draft.get("model") == model
