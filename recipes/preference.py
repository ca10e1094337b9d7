"""Preference optimization, full or with adapters: DPO and its variants, SimPO, ORPO, KTO, and weighted sums of losses.

tune run preference nano/dpo
tune run preference llama3_2/1b_dpo_lora loss.beta=0.05
tune run preference qwen3/1_7b_orpo_lora data.source=mine.jsonl
"""

from dataclasses import dataclass, replace

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer, read_checkpoint
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.preference_data import PreferenceData
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.distributed.context import DistributedContext
from tunekit.losses.dpo import DPO, DPOFamily
from tunekit.losses.metric_sums import MetricSums
from tunekit.losses.preference_objective import PreferenceObjective
from tunekit.losses.reference_free import ReferenceFreeFamily
from tunekit.losses.router_losses import RouterLosses
from tunekit.losses.unpaired import UnpairedFamily
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.early_stopping import EarlyStopping
from tunekit.training.export import export_final
from tunekit.training.forgetting import ForgettingMonitor
from tunekit.training.generation_monitor import GenerationMonitor
from tunekit.training.packing_check import check_packing
from tunekit.training.reference_model import AutoReference, Reference, ReferenceInputs
from tunekit.training.run_context import RunContext
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.step_guard import StepGuard


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(TrainConfig):
    """The keys of this recipe."""

    data: PreferenceData  # Training rows: preference pairs, or single answers with labels
    eval_data: PreferenceData | None = None  # Held-out rows for evaluation during training
    loss: tuple[DPOFamily | ReferenceFreeFamily | UnpairedFamily, ...] = (DPO(),)  # One loss, or several that are added
    reference: Reference = AutoReference()  # Reference model; `auto`: the cheapest that works
    ld_alpha: float = 1.0  # LD-DPO: weight of the tokens beyond the shorter answer (arXiv:2409.06411)
    # Weight of the load-balancing loss of MoE routers (arXiv:2101.03961); null: that of config.json if it has
    # `output_router_logits: true`, else 0
    router_aux_loss_coef: float | None = None
    router_z_loss_coef: float = 0.0  # Weight of the squared log-normalizers of MoE routers (arXiv:2202.08906)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference.check(self, self.objective)

    @property
    def objective(self) -> PreferenceObjective:
        """The sum of the losses, without a reference."""
        routers = RouterLosses(
            router_aux_loss_coef=self.router_aux_loss_coef, router_z_loss_coef=self.router_z_loss_coef
        )
        return PreferenceObjective(self.loss, self.ld_alpha, routers=routers)


CONFIG = PreferenceConfig


def check(cfg: PreferenceConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    cfg.objective.check_data(cfg.data, cfg.eval_data)
    cfg.objective.routers.check_routers(read_checkpoint(cfg).spec, cfg.compile)


def main(cfg: PreferenceConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write the result to `final/` in the run directory."""
    with RunContext(cfg, "preference", overwrite) as run:
        if not run.is_complete:
            train(cfg, run)
        run.push_result()


def train(cfg: PreferenceConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    forgetting = ForgettingMonitor(tokenizer, run)
    generation = GenerationMonitor(tokenizer, run)
    model = load_model(checkpoint, cfg, dist)
    objective = cfg.objective.prepare_data(model, train_data, eval_data, dist)
    reference_inputs = ReferenceInputs(run, checkpoint, model, train_data, eval_data, objective)
    objective = replace(objective, reference=cfg.reference.open(reference_inputs))
    num_steps = run.begin(train_data)

    optimizer = build_optimizer(cfg, model, dist)
    lr_scheduler = cfg.lr_scheduler.build(optimizer.inner, num_steps)
    prefetcher = Prefetcher(train_data, dist.device)
    guard = StepGuard(cfg.step_guard, dist, prefetcher)
    early_stopping = EarlyStopping(cfg)
    checkpointer = run.open_checkpointer(
        model, optimizer, lr_scheduler, early_stopping, data=prefetcher, guard=guard,
        forgetting=forgetting, running_mean=objective.running_mean,
    )  # fmt: skip
    step = checkpointer.restore()  # 0 in a new run
    if step == 0:
        check_packing(model, train_data, dist)
    logger = run.open_logger(num_steps, step)

    with checkpointer, logger, run.profiler, prefetcher.start(guard.data_step(step), guard.data_step(num_steps)):
        if step == 0 and cfg.has_evaluation:
            metrics = objective.evaluate(model, eval_data, dist) | generation.evaluate(model, 0, logger)
            early_stopping.check_metric(logger.log_eval(0, metrics))
        forgetting.begin(model, step, logger)
        guard.begin(step, checkpointer)  # saves step 0 if the run may roll back
        run.handle_signals()
        while step < num_steps and not early_stopping.triggered:
            run.begin_step(step, logger)  # heartbeat, profiler, random seed of this step
            batches = prefetcher.next()  # the micro-batches of this rank
            loss, metrics = forward_backward(model, batches, objective, dist)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not guard.accepts(step, loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            lr = lr_scheduler.get_last_lr()[0]
            lr_scheduler.step()
            if guard.needs_rollback(logger):
                step = guard.roll_back(checkpointer, logger)  # to the last training state; skips the data since then
                continue
            step += 1
            logger.log_step(step, batches, prefetcher.data_time, loss=loss, grad_norm=grad_norm, lr=lr, **metrics)

            due = run.due_after(step, num_steps)
            with logger.pause():  # not part of the step time
                if due.any:
                    guard.check_all(logger)  # raises if a step was not finite, before its weights are used
                if due.push:
                    run.push_checkpoint(step, num_steps, model, checkpoint)
                if due.eval:
                    metrics = objective.evaluate(model, eval_data, dist) | generation.evaluate(model, step, logger)
                    early_stopping.update(step, logger.log_eval(step, metrics))
                if due.forgetting:
                    forgetting.evaluate(model, step, logger)
                if due.save or early_stopping.needs_save(step) or forgetting.exceeded:
                    checkpointer.save(step)
                    run.exit_if_stop_requested(step, num_steps)
                    forgetting.raise_if_exceeded(step)
                checkpointer.poll()  # raises if a save in the background has failed
        step = early_stopping.finish(checkpointer, step, num_steps)  # loads the best weights
    export_final(run, model, checkpoint, (train_data, eval_data), step)


def forward_backward(
    model: Decoder, batches: list[Batch], objective: PreferenceObjective, dist: DistributedContext
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the gradients of one optimizer step. Returns its loss and its other metrics, over all ranks.

    Chosen and rejected answers are in the same forward pass.
    """
    sums = MetricSums()
    micro_batches, state = objective.begin_step(model, batches, dist)
    for i, micro_batch in enumerate(micro_batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(micro_batches))  # reduce gradients in the last micro-batch only
        logps = objective.compute_logps(model, micro_batch)
        loss = objective.loss(logps, state) + objective.router_loss(model, logps, state)
        (loss * dist.grad_scale).backward()  # FSDP averages gradients over ranks; this makes it a sum
        sums.add(objective.metric_sums(logps, loss, state))
        state = state.after(logps)
    metrics = objective.to_metrics(sums.means(dist, 1)) | objective.routers.pop_metrics(model, dist)
    return metrics.pop("loss"), metrics
