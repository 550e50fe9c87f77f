"""The peak rates of GPUs in floating-point operations per second, by name. Pure.

The figures are those of the makers' data sheets, for dense matrices. Where a sheet states only the
rate with sparsity, the table has half of it. The sources are:

- H200, H100 (SXM, NVL, PCIe), A100, L40S, L4, T4, V100, A10: the data sheet of each at nvidia.com.
- RTX 4090: "NVIDIA Ada GPU Architecture" (white paper), with sums in float32.
- RTX 3090: "NVIDIA Ampere GA102 GPU Architecture" (white paper), with sums in float32.

A part of a GPU (MIG), a laptop's GPU and other variants have other names and other rates. They are
not in the table, and `runtime.peak_flops` of the config states their rate.
"""

from __future__ import annotations

import re

_TERA = 1e12
# The dtype tensor_float32 is float32 whose products may use TensorFloat-32. GPUs without it compute
# in float32.
_DTYPES = ("bfloat16", "float16", "tensor_float32", "float32")
# Teraflops for each dtype, by the name that the driver reports without maker and series. 0 where
# the GPU has no such mode.
_TERAFLOPS = {
    r"H200": (989.5, 989.5, 494.5, 67.0),
    r"H200 NVL": (835.5, 835.5, 417.5, 60.0),
    r"H100 80GB HBM3": (989.5, 989.5, 494.5, 67.0),
    r"H100 NVL": (835.5, 835.5, 417.5, 60.0),
    r"H100 PCIe": (756.5, 756.5, 378.0, 51.0),
    r"A100-(SXM4|PCIE)-\d+GB": (312.0, 312.0, 156.0, 19.5),
    r"A100 80GB PCIe": (312.0, 312.0, 156.0, 19.5),
    r"L40S": (362.0, 362.0, 183.0, 91.6),
    r"L4": (121.0, 121.0, 60.0, 30.3),
    r"A10": (125.0, 125.0, 62.5, 31.2),
    r"T4": (0.0, 65.0, 8.1, 8.1),
    r"V100-SXM[23]-\d+GB": (0.0, 125.0, 15.7, 15.7),
    r"V100-PCIE-\d+GB": (0.0, 112.0, 14.0, 14.0),
    r"RTX 4090": (165.2, 165.2, 82.6, 82.6),
    r"RTX 3090": (71.0, 71.0, 35.6, 35.6),
}


def find_peak_flops(device_name: str, dtype: str) -> float | None:
    """Returns the peak rate of one GPU for products of matrices, in FLOPs per second.

    Args:
      device_name: The name that the driver reports, such as "NVIDIA A100-SXM4-40GB".
      dtype: The dtype of computation: bfloat16, float16, float32, or tensor_float32 for float32
        with TensorFloat-32, which is TensorFlow's default on GPUs that have it.

    Returns:
      The rate. None if the GPU is not in the table, or has no such mode.
    """
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name)
    for pattern, teraflops in _TERAFLOPS.items():
        if re.fullmatch(pattern, name):
            rates = dict(zip(_DTYPES, teraflops, strict=True))
            rate = rates.get(dtype, 0.0)
            return _TERA * rate or None
    return None
