import pytest
import torch

from tests.runtime.fake_runner import full_spec, window_spec
from treadle.ir.errors import ConfigError
from treadle.runtime.kv_layout import LAYOUTS, allocate_buffer, bytes_per_block, layer_views, plan_layout
from treadle.runtime.kv_specs import FullAttentionSpec, KVCacheGroup, MLASpec, SSMSpec, group_layers

NUM_BLOCKS = 5
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=2, dtype="bf16")
GROUPS = (KVCacheGroup((0, 1), SPEC), KVCacheGroup((2, 3), SPEC))
PAGE, CONTENT = 3 * 4 * 4 * 2, 4 * 2  # bytes


def address(name: str, position: int, block: int, head: int, state: int) -> int:
    """The byte where a state lies, written out for each layout."""
    if name == "LBHNC":
        return position * NUM_BLOCKS * PAGE + block * PAGE + (head * 4 + state) * CONTENT
    if name == "BLHNC":
        return block * 2 * PAGE + position * PAGE + (head * 4 + state) * CONTENT
    return block * 2 * PAGE + ((head * 2 + position) * 4 + state) * CONTENT


@pytest.mark.parametrize("name", LAYOUTS)
def test_writes_land_at_the_predicted_bytes(name):
    """C01-11: views are strides over the buffer: no copy, and each element lies where the layout says."""
    layout = plan_layout(GROUPS, NUM_BLOCKS, name)
    buffer = allocate_buffer(layout)
    assert layout.size == buffer.numel() == bytes_per_block(GROUPS) * NUM_BLOCKS
    views = layer_views(layout, buffer)
    assert views[1].shape == (NUM_BLOCKS, 3, 4, 4) and views[1].dtype is torch.bfloat16
    for layer, position in ((0, 0), (1, 1), (2, 0), (3, 1)):
        for block, head, state in ((0, 0, 0), (4, 2, 3), (2, 1, 0)):
            buffer.zero_()
            views[layer][block, head, state].fill_(1.0)
            start = address(name, position, block, head, state)
            assert buffer.nonzero().flatten().tolist() == [b for b in range(start, start + CONTENT) if buffer[b]]
            assert buffer[start : start + CONTENT].view(torch.bfloat16).tolist() == [1.0] * 4
            assert views[layer].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_of_a_group_do_not_overlap(name):
    """C01-11: filling one layer leaves the other layer of its group untouched."""
    layout = plan_layout(GROUPS, NUM_BLOCKS, name)
    views = layer_views(layout, allocate_buffer(layout))
    views[0].fill_(1.0)
    assert not views[1].any() and views[2].eq(1.0).all(), "the other group shares the memory, block by block"
    views[1].fill_(2.0)
    assert views[0].eq(1.0).all()


def test_both_layouts_give_the_same_attention():
    """C01-11: what is written through a view is read through it, whatever the strides."""
    generator = torch.Generator().manual_seed(0)
    results = []
    values = torch.randn(NUM_BLOCKS, 3, 4, 4, generator=generator).bfloat16()
    for name in LAYOUTS:
        layout = plan_layout(GROUPS, NUM_BLOCKS, name)
        view = layer_views(layout, allocate_buffer(layout))[1]
        view.copy_(values)
        table = torch.tensor([3, 1])
        keys, vals = view[table].float().split(2, dim=-1)  # [2, H, N, D]
        keys, vals = (x.transpose(0, 1).reshape(3, 8, 2) for x in (keys, vals))
        results.append(torch.softmax(keys @ keys.transpose(1, 2), -1) @ vals)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_kernel_blocks_split_a_dense_block():
    """C01-12: block b shows as kernel blocks 2b and 2b + 1, over the same bytes."""
    layout = plan_layout(GROUPS, NUM_BLOCKS)
    buffer = allocate_buffer(layout)
    split = layer_views(layout, buffer, kernel_block_size=2)[1]
    assert split.shape == (2 * NUM_BLOCKS, 3, 2, 4)
    split[2 * 3 + 1].fill_(1.0)
    start = NUM_BLOCKS * PAGE + 3 * PAGE + PAGE // 2
    assert buffer.nonzero().min() >= start and buffer.nonzero().max() < start + PAGE // 2
    assert layer_views(layout, buffer)[1][3].float().sum() == 3 * 2 * 4


def test_padded_or_interleaved_layouts_do_not_split():
    """C01-12: the error names both sizes and the remedy."""
    padded = (KVCacheGroup((0,), MLASpec(block_size=4, num_kv_heads=1, head_size=6, dtype="f32", alignment=128)),)
    for groups, name, sizes in ((padded, "LBHNC", "128 bytes.*96"), (GROUPS, "BLHNC", "192 bytes.*96")):
        layout = plan_layout(groups, NUM_BLOCKS, name)
        with pytest.raises(ValueError, match=rf"(?s)4 tokens.*of 2.*{sizes}.*choose block_size=2"):
            layer_views(layout, allocate_buffer(layout), kernel_block_size=2)


@pytest.mark.parametrize("kernel_block_size", [3, 8])
def test_uneven_kernel_blocks(kernel_block_size):
    """C01-12: kernel blocks must divide the block."""
    layout = plan_layout(GROUPS, NUM_BLOCKS)
    with pytest.raises(ConfigError, match="multiple of"):
        layer_views(layout, allocate_buffer(layout), kernel_block_size)


def test_groups_of_different_pages_share_one_pool():
    """C01-11: the page of the larger kind is the stride of both; a block holds every layer's page."""
    groups = group_layers({0: full_spec(8), 1: window_spec(8)})
    layout = plan_layout(groups, NUM_BLOCKS)
    assert bytes_per_block(groups) == full_spec(8).page_size_bytes
    views = layer_views(layout, allocate_buffer(layout))
    views[1][3].fill_(1.0)
    assert views[0][3].any() and not views[0][2].any() and not views[0][4].any()


def test_bad_layouts_are_refused():
    """C01-11: unknown names and layouts that cannot hold the groups say what to choose."""
    with pytest.raises(ConfigError, match="LBHNC, BLHNC, BHLNC"):
        plan_layout(GROUPS, NUM_BLOCKS, "LBHCN")
    with pytest.raises(ConfigError, match="equal head geometry"):
        plan_layout((GROUPS[0], KVCacheGroup((4,), full_spec())), NUM_BLOCKS, "BHLNC")
    padded = MLASpec(block_size=4, num_kv_heads=1, head_size=6, dtype="f32", alignment=128)
    with pytest.raises(ConfigError, match="padding"):
        plan_layout((KVCacheGroup((0,), padded),), NUM_BLOCKS, "BHLNC")


def test_ssm_pages_are_bytes():
    """C01-11: a state of several tensors is seen as one run of bytes."""
    spec = SSMSpec(block_size=16, shapes=((2, 3), (4,)), dtypes=("bf16", "f32"))
    layout = plan_layout((KVCacheGroup((0,), spec),), NUM_BLOCKS)
    assert layer_views(layout, allocate_buffer(layout))[0].shape == (NUM_BLOCKS, 1, 1, 28)
