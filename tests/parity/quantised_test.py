"""The layouts of quantised checkpoints as the library reads them: the same bits as ours.

What the library gets differently: scales of e8m0 that are bytes (MXFP8) become a power by `exp2` in
float32; a block size that does not divide a matrix is refused, where released files may have one.
"""

import numpy as np
import pytest

from models.quantised.blocks import FP4, FP8, FP8_POWERS, Blocks

torch = pytest.importorskip("torch")


def codes_of(blocks: Blocks, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of normal numbers of many magnitudes; codes of NaN left out."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-30, 30, (*shape[:-1], 1))
    return blocks.encode(values.astype(np.float32))


def test_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes, scales = codes_of(FP4, (3, 64, 96))
    blocks = torch.from_numpy(codes.reshape(3, 64, 3, 16))
    got = convert_moe_packed_tensors(blocks, torch.from_numpy(scales), dtype=torch.float32)
    want = FP4.decode(codes, scales).swapaxes(-1, -2)
    assert got.numpy().tobytes() == np.ascontiguousarray(want).tobytes()


@pytest.mark.parametrize("blocks", [FP8, FP8_POWERS, FP4], ids=lambda x: x.name)
def test_block_scales(blocks: Blocks) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = codes_of(blocks, (256, 384))
    kind = torch.int8 if blocks is FP4 else torch.float8_e4m3fn
    held = torch.from_numpy(scales)
    held = held.view(torch.float8_e8m0fnu) if scales.dtype == np.uint8 else held
    weight = torch.from_numpy(codes).view(kind)
    got = Fp8Dequantize(None)._dequantize_one(weight, held, torch.float32)
    assert got.numpy().tobytes() == blocks.decode(codes, scales).tobytes()
