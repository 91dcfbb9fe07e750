# SPDX-License-Identifier: MIT
"""Runs the interop suite and closes on `N passed, N failed, N skipped`: python tests/interop [WORD ...]

Only tests with one of the words in their name are run, all without a word.
"""
import os
import pathlib
import sys
import unittest
import warnings

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "remote")]
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error",
                  HF_HUB_DISABLE_PROGRESS_BARS="1", CUDA_VISIBLE_DEVICES="")


class Result(unittest.TextTestResult):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def leaves(suite):
    for t in suite:
        if isinstance(t, unittest.TestSuite):
            yield from leaves(t)
        else:
            yield t


def main(words):
    import mounted
    warnings.simplefilter("ignore")
    if not mounted.can_mount():
        print("/dev/fuse is not to be had: skipped\n0 passed, 0 failed, 1 skipped")
        return 0
    import torch
    torch.set_num_threads(1)  # the ranks are forked from this process
    loader = unittest.TestLoader()
    suite = loader.discover(str(HERE))
    if words:
        suite = unittest.TestSuite(t for t in leaves(suite) if any(w in t.id() for w in words))
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Result, warnings="ignore").run(suite)
    bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    print(f"{result.passed} passed, {bad} failed, {len(result.skipped)} skipped")
    return 1 if bad or not result.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
