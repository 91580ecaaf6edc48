"""The tensor-parallel bench as a CPU can run it, and how it tells one kind of kernel from another."""

from __future__ import annotations

import pytest

from tests.bench.gpu import suite, tensor_parallel
from tests.bench.gpu.kernels import NOTHING, OTHER, Kernel, kind_of, spent_us_by_kind


def test_both_sizes_are_measured_at_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    tensor_parallel.main(
        [
            "--device",
            "cpu",
            "--tiny",
            "--batches",
            "1",
            "2",
            "--context",
            "32",
            "--prompt",
            "48",
            "--steps",
            "1",
        ]
    )
    figures = suite.read_figures(capsys.readouterr().out.splitlines())
    found = {(figure.line, figure.plot.rpartition(", ")[2], figure.x) for figure in figures}
    steps = {(what, batch) for what in ("step", "draft", "verify") for batch in (1, 2)}
    works = steps | {("prefill", 48)}
    assert found == {(size, *work) for size in ("TP 1", "TP 2") for work in works}
    assert all(figure.value > 0 for figure in figures)
    assert all((figure.ratio is not None) == (figure.line == "TP 2") for figure in figures)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("_attend_kernel", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNN", "products"),
        ("void cutlass::device_kernel<flash_gemm>", "products"),
        ("_add_rms_norm_kernel", OTHER),
        ("void at::native::vectorized_elementwise_kernel<...>", OTHER),
    ],
)
def test_a_kernel_s_kind_is_in_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_is_counted_by_kind_and_gaps_between_kernels_as_none() -> None:
    kernels = [
        Kernel("nccl a", 0.0, 4.0),
        Kernel("_attend_kernel", 6.0, 9.0),
        Kernel("nccl b", 8.0, 10.0),  # beside the one before
        Kernel("x", 10.5, 11.0),
    ]
    assert spent_us_by_kind(kernels) == {"exchange": 6.0, "attention": 3.0, OTHER: 0.5, NOTHING: 2.5}
