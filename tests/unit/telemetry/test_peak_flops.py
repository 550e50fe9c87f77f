"""The peak rates of GPUs, by the names that drivers report."""

from __future__ import annotations

import pytest

from trainer_kit.telemetry.peak_flops import find_peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA H100 80GB HBM3", "tensor_float32", 494.5),
        ("NVIDIA H100 PCIe", "float16", 756.5),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312.0),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("Tesla T4", "float16", 65.0),
        # Without TensorFloat-32 products are computed in float32.
        ("Tesla T4", "tensor_float32", 8.1),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA GeForce RTX 3090", "float32", 35.6),
    ],
)
def test_the_peak_of_a_gpu_depends_on_the_dtype(name: str, dtype: str, teraflops: float) -> None:
    assert find_peak_flops(name, dtype) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla T4", "bfloat16"),
        ("NVIDIA H200", "float64"),
        ("NVIDIA A10G", "bfloat16"),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("", "float32"),
    ],
)
def test_the_peak_of_other_gpus_and_modes_is_not_known(name: str, dtype: str) -> None:
    assert find_peak_flops(name, dtype) is None
