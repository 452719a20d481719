"""Ascend NPUs as plain facts: the product families, and which attention operators each has.

Families and operators are those of torch_npu 2.13 and op-plugin at 517f2e7: what a family's page documents, and what
torch_npu's own dispatch sends there. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

INFERENCE = "npu_fused_infer_attention_score"
TRAINING = "npu_fusion_attention_v3"
TRAINING_V1 = "npu_fusion_attention"


@dataclass(frozen=True)
class Generation:
    """One product family, which torch_npu calls by its generation.

    ``socs`` are the beginnings of the names that the runtime reports. ``stock`` is what torch's own
    ``scaled_dot_product_attention`` ends in there; without one it is unfused.
    """

    name: str
    socs: tuple[str, ...]
    operators: tuple[str, ...] = ()
    stock: str = ""
    refusal: str = ""  # why it has no operator this project calls


# Longer names first: the runtime calls the first generation's variant "Ascend910B", and the A2's "Ascend910B1" and on.
GENERATIONS: tuple[Generation, ...] = (
    # The page of v3 names A2 alone; torch_npu's own call reaches it from Ascend910B1 on, A3 included.
    Generation("A3", ("Ascend910_93",), (INFERENCE, TRAINING), TRAINING),
    Generation("A2", ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4"), (INFERENCE, TRAINING), TRAINING),
    # v3 raises there, and neither page of the inference operator names it.
    Generation("950", ("Ascend950", "Ascend910_95"), (TRAINING_V1,), TRAINING_V1),
    Generation(
        "310P",
        ("Ascend310P",),
        refusal="Atlas inference accelerators (310P) have npu_prompt_flash_attention alone, which is never emitted",
    ),
    Generation(
        "310B",
        ("Ascend310B",),
        refusal="CANN has no fused attention for Atlas 200I (310B)",
    ),
    Generation(
        "910",
        ("Ascend910A", "Ascend910B", "Ascend910Pro", "Ascend910Premium"),
        refusal="the first generation (Ascend 910) has no fused attention that torch reaches",
    ),
)
_BY_NAME = {known.name: known for known in GENERATIONS}
UNKNOWN = "A2"  # what is planned for where the device does not say


def generation(name: str) -> Generation:
    """A generation by its name, "A2"."""
    return _BY_NAME[name]


def generation_of(soc: str) -> Generation | None:
    """The generation of a name the runtime reports ("Ascend910B3"), in any case; None for one that is not known."""
    for known in GENERATIONS:
        if any(soc.lower().startswith(begins.lower()) for begins in known.socs):
            return known
    return None
