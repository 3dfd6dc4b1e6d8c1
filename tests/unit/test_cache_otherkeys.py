"""One answer under the keys of all who ask for it."""

from __future__ import annotations

from pipeline.cache.otherkeys import how_many_more, other_keys, second_keys_note, with_other_keys
from pipeline.tune.agreement import Held

# As FlashInfer 0.6.16.post3 wrote them on an H200
SHAPES, DTYPES = "((1, 8, 4096), (1, 4096, 6144), {}, (1, -1, 6144), (-1,))", "torch.float8_e4m3fn"
FP8 = f"('fp8_gemm', 'CublasFp8GemmRunner', {SHAPES}, ({DTYPES}, {DTYPES}, torch.bfloat16))"
SCALARS, VECTORS = FP8.format("(), ()"), FP8.format("(1,), (1,)")
BF16 = (
    "('bf16_gemm', 'CublasltBf16GemmRunner', ((1, 4096), (4096, 6144), (0,), (0,), (-1, 6144), (33554432,)), "
    "(1, 6144, 4096, torch.bfloat16))"
)


def test_only_fp8_products_have_another_key() -> None:
    assert other_keys(SCALARS) == (VECTORS,)
    assert other_keys(VECTORS) == other_keys(BF16) == other_keys("") == ()


def test_the_answer_stands_under_both_keys_with_its_owners() -> None:
    held, other = Held("CublasFp8GemmRunner", 7), Held("CublasltBf16GemmRunner", 3)
    owners: dict[str, tuple[int, ...]] = {SCALARS: (0, 2)}
    found = with_other_keys({SCALARS: held, BF16: other}, owners)
    assert found == {SCALARS: held, BF16: other, VECTORS: held}
    assert owners == {SCALARS: (0, 2), VECTORS: (0, 2)}
    assert how_many_more([SCALARS, BF16]) == 1
    assert "1 entry of fp8_gemm stands" in second_keys_note(1) and "2 entries of fp8_gemm stand" in second_keys_note(2)


def test_an_answer_of_its_own_is_kept() -> None:
    own, held = Held("CudnnFp8GemmRunner", 1), Held("CublasFp8GemmRunner", 7)
    assert with_other_keys({VECTORS: own, SCALARS: held}, {})[VECTORS] == own
    assert how_many_more([SCALARS, VECTORS]) == 0
    assert second_keys_note(0) == ""
