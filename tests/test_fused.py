"""The kernels against torch: on a CPU in Triton's interpreter, on a GPU as they are. What is checked is in
`fused_checks.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import NO_TRITON

if NO_TRITON:
    pytest.skip(NO_TRITON, allow_module_level=True)

from tests.fused_checks import checks


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """All checks that were asked for, in one child."""
    mine = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in mine if item.originalname == "test_in_the_interpreter"]  # type: ignore[attr-defined]
    return checks.run(names)


@pytest.mark.parametrize("name", checks.interpreted)
def test_in_the_interpreter(name: str, outcomes: dict[str, str | None]) -> None:
    if outcomes[name] is not None:
        pytest.fail(outcomes[name], pytrace=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", checks.table)
def test_on_a_gpu(name: str) -> None:
    with torch.random.fork_rng():
        checks.table[name](torch.device("cuda"))
