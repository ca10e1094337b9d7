"""Checks before training that its result can be saved: the files are written without tensor data, and opened again."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import atomic, final_checkpoint, save_model, training_state
from tunekit.checkpoint.dcp_planner import TENSOR_OVERHEAD
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.run_dir import FINAL, STATE
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.system import existing_parent, file_system, format_binary_bytes, free_bytes
from tunekit.training.config import TrainConfig

STATE_OVERHEAD = 2**20  # bytes of the files of a training state that have no tensors
TENSORS_PER_STATE = 3  # at most, of the optimizer and one weight


def check_can_save(cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext) -> None:
    """Raise UserError if the result of a run could not be saved or opened, or if the disk is too small.

    `model` is on the meta device, with its dtypes.
    """
    dist.run_on_main(partial(try_to_save, cfg, checkpoint, model))


def try_to_save(cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder) -> None:
    """Check the disk space of a run, write the files of its result without tensor data, and open them."""
    check_disk_space(cfg, checkpoint, model)
    final_dir = Path(cfg.output_dir, FINAL)
    with trial_dir(final_dir) as directory:
        try:
            final_checkpoint.try_to_save(cfg.adapter, directory, model, checkpoint)
        except UserError as error:
            raise UserError(str(error).replace(str(directory), str(final_dir))) from error


@contextmanager
def trial_dir(folder: Path) -> Iterator[Path]:
    """The partial directory of `folder`, which is deleted at the end."""
    trial = atomic.AtomicDir(folder)
    trial.create()
    try:
        yield trial.partial
    finally:
        trial.clean_up()


def check_disk_space(cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder) -> None:
    """Raise UserError if a file system has less space than the run will need at least."""
    needed: Counter[Path] = Counter()  # by one directory of each file system
    directories: dict[int, Path] = {}
    for path, size in required_space(cfg, checkpoint, model).items():
        needed[directories.setdefault(file_system(path), path)] += size
    for path, size in needed.items():
        if size > (free := free_bytes(path)):
            sizes = f"{format_binary_bytes(size)} needed, {format_binary_bytes(free)} free in {existing_parent(path)}"
            raise UserError(
                f"output_dir: not enough disk space for the result and a training state in {cfg.output_dir} ({sizes}). "
                "Free disk space, or set another output_dir."
            )


def required_space(cfg: TrainConfig, checkpoint: HFCheckpoint, model: Decoder) -> dict[Path, int]:
    """Bytes that a run writes at least, by directory. A new training state replaces one that exists."""
    final_dir, state_dir = Path(cfg.output_dir, FINAL), Path(cfg.output_dir, STATE)
    result = final_checkpoint.result_bytes(cfg.adapter, model, checkpoint)
    if cfg.push_to_hub is not None and cfg.push_to_hub.merge_adapter and isinstance(cfg.adapter, LoRAConfig):
        entries = ((meta.shape, meta.dtype) for meta in checkpoint.tensors.values())
        result += sum(map(save_model.tensor_bytes, entries))
    state = state_bytes(cfg, model)
    if training_state.complete_states(state_dir) and file_system(state_dir) == file_system(final_dir):
        return {final_dir: max(result, state)}
    return {final_dir: result, state_dir: state}


def state_bytes(cfg: TrainConfig, model: Decoder) -> int:
    """Size of a training state: trained weights, buffers, and the state of the optimizer."""
    inner = {parameter for layer in model.layers for parameter in layer.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = (cfg.optimizer.state_bytes(parameter, parameter in inner) for parameter in trained)
    tensors = [*trained, *model.buffers()]
    overhead = STATE_OVERHEAD + TENSOR_OVERHEAD * (len(tensors) + TENSORS_PER_STATE * len(trained))
    return sum(tensor.nbytes for tensor in tensors) + sum(states) + overhead
