"""Training steps with the meta device as the GPU: no mixture of devices, and the host never waits."""

import pytest

from tests.gpu.device_rules import device_rules
from tests.gpu.meta_steps import build_model, build_update, make_batches, preference_step, read_spec, run_on_meta
from tunekit.adapters import Full, LoRA
from tunekit.data.signs import Sign
from tunekit.losses.comparison import Loss
from tunekit.losses.likely import CPO, ORPO, SFT, AlphaPO, SimPO
from tunekit.losses.marks import BCO, KTO, APO_Zero_Unpaired
from tunekit.losses.pairs import (
    AOT,
    DPO,
    IPO,
    AOT_Unpaired,
    APO_Down,
    APO_Zero,
    BCO_Pair,
    DiscoPOP,
    EXO_Pair,
    Hinge,
    NCA_Pair,
    Robust,
    Sigmoid_Norm,
    SPPO_Hard,
)

PAIRED = (DPO, Sigmoid_Norm, Hinge, IPO, Robust, EXO_Pair, NCA_Pair, BCO_Pair, SPPO_Hard, AOT, AOT_Unpaired,
          APO_Zero, APO_Down, DiscoPOP, SFT, CPO, SimPO, AlphaPO, ORPO)  # fmt: skip
UNPAIRED = KTO, BCO, APO_Zero_Unpaired


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss", [*PAIRED, *UNPAIRED])
def test_preference_losses(loss: type[Loss], packed: bool) -> None:
    run, adapter = run_on_meta(), LoRA(4) if packed else Full()
    model = build_model(read_spec("llama3.2", layers=1), adapter=adapter)
    batches = make_batches(packed, model.spec.vocab, Sign.GOOD, crossed=40 if loss in UNPAIRED else 0)
    update = build_update(model, adapter, run)
    with device_rules() as rules:
        taken = preference_step(model, (loss(),), batches, update, run)
    assert taken.loss.is_meta
    assert not {site for site in rules.blocking_copies if "losses" in site}
