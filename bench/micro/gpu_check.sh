#!/usr/bin/env bash
# Check and time the kernels on a GPU in at most four minutes. Needs Python with torch, triton and numpy, no sglang:
#
#     bench/micro/gpu_check.sh [--output FILE] [--stock-file MAMBA_SSM_PY]
#
# Prints one table: bitwise checks, then times for batch 1, 8 and 64, bf16 and fp32, sequential and random pages, with the
# copy bandwidth of the same run. The table goes to docs/measurements/kernels_gpu.md, or to FILE. PYTHON names the
# interpreter. Without a CUDA device it says so and prints the static table.
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=240
exec timeout "$limit" "${PYTHON:-python3}" -u -m bench.micro.kernels --quick --seconds 170 "$@"
