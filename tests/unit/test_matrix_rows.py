"""A row of a matrix product does not depend on how many others are computed with it, from `exact.rows_enough` on.

That is a property of the machine's matrix library, not of this project; exact continuation rests on it.
"""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.seams import exact
from sgl_hybrid.seams.exact import MIN_ROWS, MIN_ROWS_OF_ONE_THREAD, pad_logits, pad_rows

SHAPES = [(256, 320), (256, 2072), (768, 256), (1024, 24)]
"""Inputs and outputs of projections, those of the nano models among them."""
pytestmark = pytest.mark.usefixtures("threads")


@pytest.fixture(autouse=True)
def exactly(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Serve with exact continuation, or without where a test is called with False."""
    wanted = getattr(request, "param", True)
    monkeypatch.setattr(exact, "is_exact", lambda: wanted)


def linear(self: object, layer: torch.nn.Linear, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What SGLang's method computes on a CPU."""
    return torch.nn.functional.linear(x, layer.weight, bias)


def layer_and_rows(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(inputs)
    return torch.nn.Linear(inputs, outputs, bias=False).to(dtype), torch.randn(1100, inputs).to(dtype)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_do_not_depend_on_their_number(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    layer, x = layer_and_rows(inputs, outputs, dtype)
    with torch.no_grad():
        whole = pad_rows(linear, None, layer, x)
        for rows in (1, 2, 3, 5, 7, 8, 9, MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1, 100, 511, 512, 513, 1000):
            for start in (0, 1, 37):
                part = pad_rows(linear, None, layer, x[start : start + rows])
                assert torch.equal(part, whole[start : start + rows]), (rows, start)


def test_few_rows_do_depend_on_their_number_without_padding() -> None:
    """What the padding is for."""
    layer, x = layer_and_rows(768, 256, torch.float32)
    with torch.no_grad():
        whole = linear(None, layer, x)
        assert not all(torch.equal(linear(None, layer, x[:rows]), whole[:rows]) for rows in (1, 2, 3))


@pytest.mark.parametrize(
    ("exactly", "threads", "rows", "seen"),
    [
        (True, 1, 5, MIN_ROWS_OF_ONE_THREAD),
        (True, 1, MIN_ROWS_OF_ONE_THREAD + 1, MIN_ROWS_OF_ONE_THREAD + 1),
        (True, 2, 5, MIN_ROWS),
        (True, 2, MIN_ROWS, MIN_ROWS),
        (True, 2, 0, 0),
        (False, 1, 5, 5),
    ],
    indirect=["exactly", "threads"],
)
def test_few_rows_are_padded_under_exact_continuation(rows: int, seen: int) -> None:
    found = []

    def original(self: object, layer: None, x: torch.Tensor, bias: None) -> torch.Tensor:
        found.append(x.shape[0])
        return x

    x = torch.ones(rows, 8)
    assert torch.equal(pad_rows(original, None, None, x), x)
    assert found == [seen]


@pytest.mark.parametrize("given", [False, True])
def test_logits_do_not_depend_on_the_number_of_requests(given: bool) -> None:
    """given: SGLang may hand in the tensor that they are to be written to."""
    layer, x = layer_and_rows(256, 512, torch.float32)

    def original(
        self: object, hidden: torch.Tensor, head: torch.nn.Linear, bias: None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = torch.matmul(hidden, head.weight.T)
        return found if out is None else out.copy_(found)

    with torch.no_grad():
        whole = pad_logits(original, None, x[:MIN_ROWS], layer)
        for requests in (1, 2, 3, 5, 9, 31):
            out = torch.empty(requests, 512) if given else None
            found = pad_logits(original, None, x[:requests], layer, out=out)
            assert torch.equal(found, whole[:requests]), requests
            assert out is None or found is out
