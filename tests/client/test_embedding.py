"""Views of an embedding: the right numbers, no copy, and memory that lives as long as it is looked at."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from encoder_client.embedding import Embedding
from encoder_client.pool.embedding_pool import EmbeddingPool
from epd.encoder.v1.embedding_pb2 import DataType, TensorSpec
from tests.client.chunks import ready, rows


async def embedded(pool: EmbeddingPool, count: int = 6, width: int = 8) -> Embedding:
    data = rows(count, width)
    slot = (await pool.reserve("p", [data.nbytes])).take(0)
    slot.view[:] = data.tobytes()
    return Embedding(ready(data), slot, "inline", 0.0)


async def test_views_hold_the_rows() -> None:
    embedding = await embedded(EmbeddingPool(4096))
    np.testing.assert_array_equal(embedding.numpy(), rows())
    np.testing.assert_array_equal(embedding.torch().numpy(), rows())
    assert embedding.numpy().shape == (6, 8)
    assert embedding.nbytes == 192
    assert embedding.grid == (1, 12, 2)
    assert embedding.names == ("embedding",)
    assert "float32" in repr(embedding)


async def test_views_share_the_pools_memory() -> None:
    pool = EmbeddingPool(4096)
    embedding = await embedded(pool)
    embedding.numpy()[2, 3] = 42.0
    assert embedding.torch()[2, 3] == 42.0
    assert pool.address <= embedding.torch().data_ptr() < pool.address + pool.capacity


async def test_the_memory_stays_as_long_as_a_view() -> None:
    pool = EmbeddingPool(4096)
    embedding = await embedded(pool)
    array, tensor = embedding.numpy()[1:3], embedding.torch().T
    embedding.release()
    embedding.release()
    del embedding
    gc.collect()
    assert pool.statistics.slots == 1
    del array
    gc.collect()
    assert pool.statistics.slots == 1
    np.testing.assert_array_equal(tensor.numpy().T, rows())
    del tensor
    gc.collect()
    assert pool.statistics.slots == 0


async def test_a_released_embedding_gives_no_views() -> None:
    embedding = await embedded(EmbeddingPool(4096))
    embedding.release()
    with pytest.raises(ValueError, match="released"):
        embedding.numpy()


async def test_an_unknown_tensor_is_named() -> None:
    embedding = await embedded(EmbeddingPool(4096))
    with pytest.raises(KeyError, match=r"deepstack_0.*embedding"):
        embedding.torch("deepstack_0")


async def test_strided_tensors_are_column_views_of_one_matrix() -> None:
    embedding = await embedded(EmbeddingPool(4096), 6, 12)
    matrix = rows(6, 12)
    del embedding.chunk.tensors[:]
    for index, name in enumerate(("embedding", "deepstack_0", "deepstack_1")):
        embedding.chunk.tensors.append(
            TensorSpec(
                name=name, dtype=DataType.DATA_TYPE_FLOAT32, shape=[6, 4], strides=[48, 4], byte_offset=16 * index
            )
        )
    for index, name in enumerate(embedding.names):
        expected = matrix[:, 4 * index : 4 * index + 4]
        np.testing.assert_array_equal(embedding.numpy(name), expected)
        np.testing.assert_array_equal(embedding.torch(name).numpy(), expected)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        (DataType.DATA_TYPE_FLOAT32, torch.float32),
        (DataType.DATA_TYPE_FLOAT16, torch.float16),
        (DataType.DATA_TYPE_BFLOAT16, torch.bfloat16),
        (DataType.DATA_TYPE_INT64, torch.int64),
        (DataType.DATA_TYPE_INT32, torch.int32),
    ],
)
async def test_every_dtype_comes_back_to_the_bit(dtype: DataType, torch_dtype: torch.dtype) -> None:
    values = torch.arange(-12, 12).reshape(4, 6).to(torch_dtype)
    size = values.element_size()
    pool = EmbeddingPool(4096)
    slot = (await pool.reserve("p", [values.nbytes])).take(0)
    slot.view[:] = values.view(torch.uint8).numpy().tobytes()
    chunk = ready(rows(4, 6))
    chunk.tensors[0].dtype = dtype
    chunk.tensors[0].strides[:] = [6 * size, size]
    embedding = Embedding(chunk, slot, "inline", 0.0)
    assert torch.equal(embedding.torch(), values)
    array = embedding.numpy()
    if torch_dtype == torch.bfloat16:
        array = array.view(np.uint16)
        np.testing.assert_array_equal(array, values.view(torch.uint16).numpy())
    else:
        np.testing.assert_array_equal(array, values.numpy())
