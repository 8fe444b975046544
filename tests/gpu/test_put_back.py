"""Values written for a while and put back, with device memory, lanes and fp16: the bodies of the CPU tests."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.put_back import BETWEEN, copy_wide, different, swap_data, train
from tests.helpers.streamed_updates import How

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HOWS = {"bf16": How(dtype=torch.bfloat16), "fp16": How(dtype=torch.float16, scale=256.0)}


@pytest.mark.parametrize("how", HOWS)
def test_the_master_is_as_it_was(how: str) -> None:
    untouched, _ = train("gpu", None, how=HOWS[how], device=CUDA)
    for site in ("gpu", "host", "every_site", "nvme"):
        for between in BETWEEN:
            for swap in (swap_data, copy_wide):
                values, evictions = train(site, swap, between, HOWS[how], CUDA)
                assert different(values, untouched) == [], (site, between, swap.__name__)
                assert (evictions > 0) == (site != "gpu")
