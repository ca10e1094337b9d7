"""The result of a run: a checkpoint or adapter in `final/`, read back, compared with the model, and described."""

import sys
from functools import partial
from pathlib import Path

from jinja2 import TemplateError

from tunekit import devices
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource
from tunekit.checkpoint.run_dir import REPORT
from tunekit.config.dump import to_plain_config
from tunekit.config.secrets import message_text
from tunekit.data.dataloader.build import DataLoader
from tunekit.errors import UserError
from tunekit.loggers import metrics_file
from tunekit.models.decoder import Decoder
from tunekit.publishing import model_card
from tunekit.publishing.base_model import CARD
from tunekit.report import page
from tunekit.training.run_context import RunContext

# Of files, and of values that a page cannot show
REPORT_ERRORS = (UserError, OSError, LookupError, TypeError, ValueError, ArithmeticError, TemplateError)


def export_final(
    run: RunContext,
    model: Decoder,
    checkpoint: HFCheckpoint,
    loaders: tuple[DataLoader, DataLoader | None],
    step: int,
) -> None:
    """Write `final/` atomically, verify its logits against the model, and write the model card.

    `loaders` have the training and the held-out rows, for the card. Raises UserError if the verification fails.
    """
    cfg, dist, final_dir = run.cfg, run.dist, run.final_dir
    dist.heartbeat.record(step, "finish")
    source = ModelSource(checkpoint, cfg.quantization, cfg.adapter, cfg.precision)
    with atomic.AtomicDir(final_dir, dist) as directory:
        final_checkpoint.save_final(cfg.adapter, directory, model, checkpoint, dist)
        with devices.full_fp32_matmuls():
            result = verify.verify_saved(directory, model, source, dist)
        config = to_plain_config(cfg, run.recipe)
        data = {"data": loaders[0], "eval_data": loaders[1]}
        info = model_card.ModelCardInfo(run.recipe, config, run.dir, checkpoint, model, data, dist.device)
        problem = dist.run_on_main(partial(write_model_card, directory, run.dir, info, step, result))
    dist.log(f"finished: {final_dir}\n{result}")
    if isinstance(cfg.adapter, NoAdapter) and checkpoint.has_untrained_mtp:
        dist.log(f"note: {model_card.UNTRAINED_MTP}")
    if problem is not None:
        dist.log(f"warning: {final_dir / CARD} has no details of the run: {problem}")
    if dist.is_main_process and (problem := model_card.find_divergence(metrics_file.read_metrics(run.dir))):
        dist.log(f"warning: {problem}. Do not use this result. Lower optimizer.lr and train again with --overwrite.")
    dist.run_on_main(partial(write_report, run.dir))
    verify.raise_if_failed(final_dir)


def write_report(run_dir: Path) -> None:
    """Write `report.html`. No error ends a run whose result is written."""
    try:
        page.write_run_report(run_dir)
    except REPORT_ERRORS as error:  # the steps of a custom recipe may log anything
        reason = message_text(f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else error)
        print(f"warning: {run_dir / REPORT} is not written: {reason}", file=sys.stderr, flush=True)


def write_model_card(
    directory: Path, run_dir: Path, info: model_card.ModelCardInfo, step: int, result: verify.VerificationResult
) -> str | None:
    """Write the verification into the metrics, and README.md with plots into the checkpoint.

    Data or files of the base may have been deleted during the run: then the card is short. Returns the reason.
    """
    with atomic.wrap_write_errors(directory):
        metrics_file.write_final_metrics(run_dir, step, **result.metrics)
        try:
            model_card.write_model_card(directory, info)
        except (UserError, OSError) as error:
            if atomic.find_disk_error(error) is not None:
                raise
            model_card.write_minimal_card(directory, None if info.is_from_scratch else info.source, "finetune")
            return str(error)
    return None
