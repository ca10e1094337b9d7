"""Losses of TRL's trainers."""

from typing import Any

from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys

SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired")
DPO_LOSSES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
)  # fmt: skip
KTO_LOSSES = ("kto", "apo_zero_unpaired", "bco")
RENAMED = {"aot_pair": "aot", "dpo": "sigmoid"}
DIVERGENCES = {"FDivergenceType.REVERSE_KL": "reverse_kl", "reverse_kl": "reverse_kl", "forward_kl": "forward_kl",
               "js_divergence": "js_divergence", "alpha_divergence": "alpha_divergence"}  # fmt: skip


def convert_dpo(keys: ForeignKeys, draft: Draft) -> None:
    """Loss of DPOTrainer: one, or a weighted sum."""
    names = keys.texts("loss_type") or ["sigmoid"]
    weights = keys.numbers("loss_weights")
    beta, smoothing = float(keys.number("beta", default=0.1)), float(keys.number("label_smoothing", default=0.0))
    tau, divergence = keys.number("discopop_tau"), str(keys.take("f_divergence_type", default="reverse_kl"))
    alpha = keys.number("f_alpha_divergence_coef")
    if divergence not in DIVERGENCES:
        draft.drop("f_divergence_type", divergence, "this divergence is not available: reverse_kl")
    losses = []
    for i, name in enumerate(names):
        kind = RENAMED.get(name, name)
        if kind not in DPO_LOSSES:
            draft.drop("loss_type", name, "this loss is not available: sigmoid")
            kind = "sigmoid"
        loss: dict[str, Any] = {"kind": kind} | ({"beta": beta} if kind != "sft" else {})
        if smoothing and kind in SMOOTHED:
            loss["label_smoothing"] = smoothing
        if kind == "discopop" and tau is not None:
            loss["discopop_tau"] = tau
        if (form := DIVERGENCES.get(divergence)) not in ("reverse_kl", None) and kind not in ("sft", "discopop"):
            exponent = {"kind": form, "alpha": float(alpha)} if form == "alpha_divergence" and alpha else form
            loss["f_divergence"] = exponent
        if i < len(weights):
            loss["weight"] = weights[i]
        losses.append(loss)
    if rpo := keys.number("rpo_alpha"):
        losses.append({"kind": "sft", "weight": float(rpo)})
    draft.set("loss", losses[0] if len(losses) == 1 and "weight" not in losses[0] else losses)
    convert_reference(keys, draft)
    if (ld := keys.number("ld_alpha")) is not None:
        draft.set("ld_alpha", float(ld))


def convert_reference(keys: ForeignKeys, draft: Draft) -> None:
    if keys.flag("precompute_ref_log_probs"):
        draft.set("reference", "precomputed")
    for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        if (value := keys.take(name)) is not None and not keys.peek("sync_ref_model"):
            draft.report_unneeded(name, value, "has no effect without sync_ref_model")


def convert_kto(keys: ForeignKeys, draft: Draft) -> None:
    kind = str(keys.take("loss_type", default="kto"))
    if kind not in KTO_LOSSES:
        draft.drop("loss_type", kind, "this loss is not available: kto")
    draft.set("loss.kind", kind if kind in KTO_LOSSES else "kto")
    draft.set("loss.beta", float(keys.number("beta", default=0.1)))
    for name in ("desirable_weight", "undesirable_weight"):
        if (value := keys.number(name)) is not None:
            draft.set(f"loss.{name}", float(value))
    convert_reference(keys, draft)


def convert_orpo(keys: ForeignKeys, draft: Draft) -> None:
    draft.set("loss", {"kind": "orpo", "beta": float(keys.number("beta", default=0.1))})


def convert_cpo(keys: ForeignKeys, draft: Draft) -> None:
    """CPO and SimPO, which is a loss type of CPOTrainer."""
    name = str(keys.take("loss_type", default="sigmoid"))
    kind = {"simpo": "simpo", "alphapo": "alphapo"}.get(name, "cpo")
    if name not in ("simpo", "alphapo", "sigmoid"):
        draft.drop("loss_type", name, "the loss of CPO is sigmoid")
    draft.set("loss", {"kind": kind, "beta": float(keys.number("beta", default=0.1))})
    weight, gamma = keys.number("cpo_alpha", default=1.0), keys.number("simpo_gamma", default=0.5)
    if kind == "cpo":
        draft.set("loss.cpo_alpha", float(weight))
    else:
        draft.set("loss.simpo_gamma", float(gamma))
        if weight:
            draft.differs("cpo_alpha", weight, "for a sum with the likelihood, set loss='[simpo, sft]'")
    if smoothing := keys.number("label_smoothing", default=0.0):
        draft.set("loss.label_smoothing", float(smoothing))
    if kind == "alphapo" and (alpha := keys.number("alpha")) is not None:
        draft.set("loss.alpha", float(alpha))


def convert_reward(keys: ForeignKeys, draft: Draft) -> None:
    draft.set("loss", "bradley_terry")
    if coefficient := keys.number("center_rewards_coefficient"):
        draft.set("loss.center_rewards_coefficient", float(coefficient))


def convert_prm(keys: ForeignKeys, draft: Draft) -> None:
    draft.set("loss", "process_reward")
    if (separator := keys.take("step_separator")) is not None:
        draft.set("data.step_separator", separator)


def convert_bco(keys: ForeignKeys, draft: Draft) -> None:
    draft.set("loss", {"kind": "bco", "beta": float(keys.number("beta", default=0.1))})
    convert_reference(keys, draft)


def convert_teacher(keys: ForeignKeys, draft: Draft) -> None:
    teacher, revision = keys.take("teacher_model_name_or_path", "teacher_model"), keys.take("teacher_model_revision")
    if teacher is not None:
        draft.set("teacher.model", f"{teacher}@{revision}" if revision not in (None, "main") else str(teacher))


def convert_gkd(keys: ForeignKeys, draft: Draft) -> None:
    """Generalized knowledge distillation: a part of the answers is the student's, and the temperature only theirs."""
    convert_teacher(keys, draft)
    draft.set("loss", {"kind": "jensen_shannon", "beta": float(keys.number("beta", default=0.5))})
    draft.set("on_policy.lmbda", float(keys.number("lmbda", default=0.5)))
    draft.set("on_policy.temperature", float(keys.number("temperature", default=0.9)))
    draft.set("on_policy.max_new_tokens", int(keys.number("max_new_tokens", default=128)))
    if keys.flag("seq_kd"):
        draft.drop("seq_kd", True, "generate the answers of the teacher with recipe generate, and train on them")


def convert_distillation(keys: ForeignKeys, draft: Draft) -> None:
    """On-policy distillation: all answers are the student's, and the temperature is that of the loss too."""
    convert_teacher(keys, draft)
    draft.set("loss", {"kind": "jensen_shannon", "beta": float(keys.number("beta", default=1.0))})
    temperature = float(keys.number("temperature", default=1.0))
    draft.set("on_policy.lmbda", 1.0)
    draft.set("on_policy.temperature", temperature)
    if temperature != 1.0:
        draft.set("loss.temperature", temperature)
    draft.set("on_policy.max_new_tokens", int(keys.number("max_completion_length", default=512)))
    if (top_p := keys.number("top_p", default=1.0)) != 1.0:
        draft.set("on_policy.top_p", float(top_p))
    if top_k := keys.number("top_k"):
        draft.set("on_policy.top_k", int(top_k))
