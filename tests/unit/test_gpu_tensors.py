"""What a GPU would be asked, on tensors that have its name and no memory: no operation mixes devices, and none of a
decode step brings a number to the host (torch's fake tensors refuse both)."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from sgl_hybrid.config import MemorySettings
from sgl_hybrid.memory import ORGANIZATIONS
from sgl_hybrid.memory.budget import Budget, Units
from sgl_hybrid.memory.checkpoints import Move
from sgl_hybrid.memory.state_memory import StateMemory
from sgl_hybrid.memory.transfer import upload
from sgl_hybrid.platforms import NO_GPU_RUN, Platform, start_line
from sgl_hybrid.seams import process
from sgl_hybrid.seams.decode_tables import Rows, StaticRows, find_rows, split_rows
from sgl_hybrid.seams.mamba_layer import Layer, PrefillPlan
from sgl_hybrid.seams.prefill_scans import Batch, TorchScans
from sgl_hybrid.seams.sizing import MemoryPlan
from sgl_hybrid.seams.stock_scans import StockOperators, StockScans
from tests.tiny_layouts import tiny_layout
from tests.tiny_mixer import mixer_of
from triton_ops.launch import Launch

pytestmark = pytest.mark.usefixtures("gpu_tensors")

CUDA = torch.device("cuda", 0)


@pytest.fixture(params=sorted(ORGANIZATIONS))
def memory(request: pytest.FixtureRequest) -> StateMemory:
    layout = tiny_layout(request.param, groups=2, conv_channels=64)
    sizes = {"num_pages": 120} if layout.shared else {"num_attention_pages": 4, "num_checkpoints": 10}
    units = Units(layout=layout, budget=Budget(text="tiny", total_bytes=0, planes=1), **sizes)
    dtypes = dict.fromkeys(("kv_dtype", "ssm_dtype", "conv_dtype"), torch.bfloat16)
    memory = StateMemory(units, device="cuda", **dtypes)
    memory.store.allocate_many(8)
    assert memory.pool.update_tables(memory.store) == 8
    return memory


def layer_of(memory: StateMemory) -> Layer:
    """The second layer, its parameters on the GPU."""
    geometry = memory.layout.geometry
    mixer = mixer_of(geometry, 1)
    for owner, names in ((mixer, ("A", "D", "dt_bias")), (mixer.conv1d, ("weight", "bias"))):
        for name in names:
            setattr(owner, name, getattr(owner, name).to(CUDA))
    return Layer(memory, mixer, geometry.recurrent_layers[1])


def projected(layer: Layer, rows: int) -> list[torch.Tensor]:
    """What a layer's convolution and time steps get for some tokens, and where its output goes."""
    channels, heads = layer.mixer.conv1d.weight.shape[0], layer.mixer.num_heads
    both = torch.zeros(rows, channels + heads, dtype=torch.bfloat16, device=CUDA)
    out = torch.zeros(rows, layer.mixer.intermediate_size, dtype=torch.bfloat16, device=CUDA)
    return [*both.split([channels, heads], dim=-1), out]


def test_the_fakes_refuse_what_a_gpu_would(memory: StateMemory) -> None:
    with pytest.raises(DataDependentOutputException):
        memory.pool.tables[0].tolist()
    with pytest.raises(RuntimeError, match="device"):
        memory.pool.tables[1:2] + torch.zeros(1, memory.pool.tables.shape[1])


def test_pools_and_tables_are_on_the_device(memory: StateMemory) -> None:
    pool = memory.pool
    held = [pool.tables, pool.attention_planes, pool.recurrent_planes, pool.key_rows(0), pool.ssm_members(1)]
    assert {tensor.device for tensor in held} == {CUDA}
    assert upload([[1, 2]], torch.int64, CUDA).device == CUDA


def test_a_decode_step_waits_for_nothing(memory: StateMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    pool, layer = memory.pool, layer_of(memory)
    source = torch.arange(memory.store.num_virtual + 1, device=CUDA)
    slots = upload([1, 2, -1], torch.int32, CUDA)
    kept, crossing = upload([0, 4, 0], torch.int64, CUDA), torch.ones(3, dtype=torch.bool, device=CUDA)
    static = StaticRows(4, pool.tables.shape[1], memory.layout.member_pages, pool.device)
    static.fill(find_rows(pool.tables, source, slots, kept, crossing))
    layer.decode(static.plan(3), *projected(layer, 3))
    assert [launch.kernel.fn.__name__ for launch in launches] == ["_conv_update_kernel", "_ssm_update_kernel"]
    assert {argument.device for launch in launches for argument in launch.args if argument is not None} == {CUDA}


def stock_operators_on_fakes(seen: list[torch.Tensor]) -> StockOperators:
    """What SGLang's functions return, and the tensors that they are given."""

    def note(*arguments: object) -> None:
        seen.extend(argument for argument in arguments if isinstance(argument, torch.Tensor))

    def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: object) -> torch.Tensor:
        note(x, weight, bias, *options.values())
        return torch.empty_like(x)

    def scan(*arguments: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        note(*arguments, *options.values())
        (_, _, heads, head_dim), sequences = arguments[0].shape, options["cu_seqlens"].shape[0] - 1
        final = arguments[0].new_empty(sequences, heads, head_dim, arguments[3].shape[-1])
        return (*arguments[:4], final, final, None)

    def states_at(*arguments: torch.Tensor) -> torch.Tensor:
        note(*arguments)
        x, B, sequences = arguments[1], arguments[0], arguments[7]
        return x.new_empty(1, sequences.shape[0], *x.shape[2:], B.shape[-1])

    return StockOperators(convolve, scan, states_at)


@pytest.mark.parametrize("stock", [False, True], ids=["torch", "stock"])
def test_a_prefill_mixes_no_devices(memory: StateMemory, stock: bool) -> None:
    """Two sequences, one that continues from a state, cut by a boundary that is kept; only its plan is the host's."""
    layer, grid = layer_of(memory), memory.layout.checkpoint_interval
    slots, kept = upload([1, 2], torch.int64, CUDA), upload([3, 4], torch.int64, CUDA)

    def rows(of: torch.Tensor) -> Rows:
        return split_rows(memory.pool.table_rows(of), memory.layout.member_pages)

    fresh = upload([False, True], torch.bool, CUDA)
    tokens = grid + 5
    batch, seen = Batch([grid - 1, 0], [0, 3, 3 + tokens], [(1, grid), (0, grid)]), []
    if stock:
        operators = stock_operators_on_fakes(seen)
        scans = StockScans(batch, operators, chunk_tokens=16, taps=memory.layout.geometry.d_conv, device=CUDA)
        assert scans.brought is not None, "the window at a boundary behind the first token is partly the state's"
    else:
        scans = TorchScans(batch, grid_tokens=grid)
    layer.prefill(PrefillPlan(scans, rows(slots), fresh, rows(slots), rows(kept)), *projected(layer, 3 + tokens))
    assert memory.copied.prefill_scatter > 0
    assert {tensor.device for tensor in seen} == ({CUDA} if stock else set())


def test_migration_waits_for_the_device_and_mixes_none(memory: StateMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    memory.move_conv([Move(checkpoint=1, old_line=1, new_line=2)])
    assert [device.type for device in waited] == ["cuda"]


def test_a_start_names_the_backends_and_warns_that_no_run_is_recorded(
    memory: StateMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_served", None)
    layout = memory.layout
    settings = MemorySettings(memory_org=layout.organization, no_exact_continuation=True)
    with caplog.at_level("INFO"):
        process.start(MemoryPlan(settings, layout.geometry, layout, None), memory)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[-2:] == [
        ("INFO", f"sgl_hybrid platform: {start_line(layout.organization, Platform.CUDA, exact=False)}"),
        ("WARNING", f"sgl_hybrid: {NO_GPU_RUN}"),
    ]
