"""Fixtures that tests of several folders ask for by name, and what pytest is told about torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

# pytest listens to every logger that does not propagate. To torch's structured trace a listener is somebody who wants
# the code of each graph at each stage, which takes as long as many tests do.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture
def quiet_torch() -> Iterator[None]:
    """No caches (tests of caches turn them on), little parallelism, nothing compiled before, a seed."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with config.patch(force_disable_caches=True, compile_threads=1):
        yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
