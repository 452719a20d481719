"""The warning where what runs next was decided for a device that its tensors are not on."""

from __future__ import annotations

import warnings

import torch

from attn_pass.devices.registry import device_for
from attn_pass.errors import AttnPassWarning
from attn_pass.options import Options
from attn_pass.report.record import Report


def warn_other_device(report: Report, options: Options, what: str = "graph", stacklevel: int = 3) -> None:
    """One warning, if a site was rewritten for a device that its tensors are not on.

    Args:
        report: the sites of one program.
        options: the user's; without ``device`` there is nothing to tell.
        what: the program, in a word.
        stacklevel: as for `warnings.warn`, from this function.
    """
    if options.device is None or options.runtime is not None:  # which comes before it
        return
    decided = device_for(torch.device("cpu"), options.device)
    others = sorted({site.device for site in report.rewritten if site.device and site.device != decided.type})
    if others:
        warnings.warn(
            f"attn_pass decided for {options.device!r}, as the option `device` says, but this {what}'s tensors are on "
            f"{' and '.join(others)}: a choice for one may be slow on the other, or fail. Leave `device` out to decide "
            "for the tensors' device; attn_pass.explain shows what another device would get",
            AttnPassWarning,
            stacklevel=stacklevel,
        )
