"""Preference optimization, full or with adapters: DPO and its variants, SimPO, ORPO, KTO, and weighted sums of losses.

tune run preference nano/dpo
tune run preference llama3_2/1b_dpo_lora loss.beta=0.05
tune run preference qwen3/1_7b_orpo_lora data.source=mine.jsonl
"""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer, read_checkpoint
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.preference_data import PreferenceData
from tunekit.distributed.context import DistributedContext
from tunekit.losses.dpo import DPO, DPOFamily
from tunekit.losses.metric_sums import MetricSums
from tunekit.losses.preference_objective import PreferenceObjective
from tunekit.losses.reference_free import ReferenceFreeFamily
from tunekit.losses.router_losses import RouterLosses
from tunekit.losses.unpaired import UnpairedFamily
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.reference_model import AutoReference, Reference, ReferenceInputs
from tunekit.training.run_context import RunContext, run_training
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.train_loop import TrainLoop


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
    run_training("preference", train, cfg, overwrite)


def train(cfg: PreferenceConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model = load_model(checkpoint, cfg, dist)
        objective = cfg.objective.prepare_data(model, train_data, eval_data, dist)
        reference_inputs = ReferenceInputs(run, checkpoint, model, train_data, eval_data, objective)
        objective = replace(objective, reference=cfg.reference.open(reference_inputs))
        optimizer = build_optimizer(cfg, model, dist)
        evaluate = partial(objective.evaluate, model, eval_data, dist)
        # Resumes; between two steps it logs, evaluates, saves, uploads, rolls back or stops as the config says
        for step in loop.start(model, optimizer, evaluate, running_mean=objective.running_mean):
            loss, metrics = forward_backward(model, step.batches, objective, dist)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not step.accepts(loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss, grad_norm, **metrics)


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
