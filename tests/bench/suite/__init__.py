# SPDX-License-Identifier: MIT
"""The frame of the benchmark suite: what a row is, how it is measured, how it is told."""
