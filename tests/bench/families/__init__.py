# SPDX-License-Identifier: MIT
"""The workloads, a module a family; each registers itself."""
