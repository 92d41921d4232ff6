"""A row of a matrix product does not depend on how many others are computed with it, from `exact.MIN_ROWS` on.

That is a property of the machine's matrix library, not of this project; exact continuation rests on it.
"""

from __future__ import annotations

import pytest
import torch

from sgl_hybrid.seams import exact
from sgl_hybrid.seams.exact import MIN_ROWS, Forward, pad_rows

SHAPES = [(256, 320), (256, 2072), (768, 256), (1024, 24)]
"""Inputs and outputs of projections, those of the nano models among them."""
pytestmark = pytest.mark.usefixtures("threads")


def linear(self: object, layer: torch.nn.Linear, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What SGLang's method computes on a CPU."""
    return torch.nn.functional.linear(x, layer.weight, bias)


def layer_and_rows(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(inputs)
    return torch.nn.Linear(inputs, outputs, bias=False).to(dtype), torch.randn(1100, inputs).to(dtype)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_of_a_prefill_do_not_depend_on_their_number(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    layer, x = layer_and_rows(inputs, outputs, dtype)
    monkeypatch.setattr(Forward, "is_prefill", True)
    with torch.no_grad():
        whole = pad_rows(linear, None, layer, x)
        for rows in (1, 2, 3, 5, 9, MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1, 100, 511, 512, 513, 1000):
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
    ("is_prefill", "shape", "seen"),
    [(True, (5, 8), MIN_ROWS), (False, (5, 8), 5), (True, (MIN_ROWS, 8), MIN_ROWS), (True, (0, 8), 0)],
)
def test_only_short_prefills_are_padded(
    monkeypatch: pytest.MonkeyPatch, is_prefill: bool, shape: tuple[int, int], seen: int
) -> None:
    monkeypatch.setattr(Forward, "is_prefill", is_prefill)
    rows = []

    def original(self: object, layer: None, x: torch.Tensor, bias: None) -> torch.Tensor:
        rows.append(x.shape[0])
        return x

    x = torch.ones(shape)
    assert torch.equal(pad_rows(original, None, None, x), x)
    assert rows == [seen]


def test_logits_of_a_prefill_do_not_depend_on_the_number_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_rows(256, 512, torch.float32)

    def original(self: object, hidden: torch.Tensor, head: torch.nn.Linear, bias: None, *, out: None) -> torch.Tensor:
        return torch.matmul(hidden, head.weight.T)

    monkeypatch.setattr(Forward, "is_prefill", True)
    with torch.no_grad():
        whole = exact.pad_logits(original, None, x[:MIN_ROWS], layer)
        for prompts in (1, 2, 3, 5, 9, 31):
            assert torch.equal(exact.pad_logits(original, None, x[:prompts], layer), whole[:prompts]), prompts


@pytest.mark.parametrize(("exactly", "num_prefills", "padded"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_a_forward_pass_says_whether_it_is_a_prefill(
    monkeypatch: pytest.MonkeyPatch, exactly: bool, num_prefills: int, padded: bool
) -> None:
    monkeypatch.setattr(Forward, "is_prefill", not padded)
    monkeypatch.setattr(exact, "is_exact", lambda: exactly)
    exact.begin_forward(num_prefills=num_prefills)
    assert Forward.is_prefill is padded
