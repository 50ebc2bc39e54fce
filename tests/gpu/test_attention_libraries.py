"""The attention libraries that are installed, on the GPU: against the reference, and replayed."""

import pytest
import torch
from dspark_kernels import torch_ops
from dspark_kernels.attention import PagedBatch
from dspark_kernels.attention_libraries import LIBRARIES, AttentionShape, LibraryMissingError, load_library

CUDA = torch.device("cuda")


@pytest.fixture(params=LIBRARIES)
def library(request):
    try:
        return load_library(request.param)
    except LibraryMissingError as error:
        pytest.skip(str(error))


def make_case(library, window=None):
    """Verification and a prompt, over blocks in random order."""
    size, heads = 256 if library.name == "flash_attn" else 16, (8, 2)
    capability = torch.cuda.get_device_capability()
    wanted = AttentionShape(*heads, 128, torch.bfloat16, torch.bfloat16, size, (window,), capability)
    if (reason := library.refusal(wanted)) is not None:
        pytest.skip(reason)
    counts, contexts = torch.tensor([1, 8, 3, 100]), torch.tensor([5, 700, 17, 300])
    width = -(-int(contexts.max()) // size)
    host = PagedBatch(
        query_start=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        kv_len=contexts.int(),
        block_tables=torch.randperm(4 * width).int().view(4, width),
        block_size=size,
        max_query=100,
        max_kv=700,
    )
    q = torch.randn(int(counts.sum()), heads[0], 128, device=CUDA).bfloat16()
    k, v = torch.randn(2, 4 * width * size, heads[1], 128, device=CUDA).bfloat16()
    return q, k, v, host.to(CUDA)


@pytest.mark.parametrize("window", [None, 33])
@torch.inference_mode()
def test_it_gives_what_the_reference_gives(library, window):
    q, k, v, batch = make_case(library, window)
    expected = torch_ops.paged_attention(q.float(), k.float(), v.float(), batch, 0.09, window)
    found = library(q, k, v, batch, 0.09, window)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


@torch.inference_mode()
def test_a_captured_call_replays_with_other_lengths(library):
    if not library.capturable:
        pytest.skip("it is not captured")
    q, k, v, batch = make_case(library)
    library(q, k, v, batch, 0.09)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = library(q, k, v, batch, 0.09)
    for contexts in ([5, 700, 17, 300], [2, 64, 3, 256], [300, 9, 699, 100]):
        batch.kv_len.copy_(torch.tensor(contexts))
        graph.replay()
        expected = torch_ops.paged_attention(q.float(), k.float(), v.float(), batch, 0.09)
        torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
