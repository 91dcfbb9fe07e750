# SPDX-License-Identifier: MIT
"""Checkpoints written here and now by the installed torch, byte for byte as it loads them itself."""
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import tempfile
import unittest

import torch

import mounted
import truth
import writers


class Fresh(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.run_dir = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-fresh-"))
        self.addCleanup(shutil.rmtree, self.run_dir)
        self.step = self.run_dir / "step"

    def same(self, flat=None, paths=None):
        if flat is None:
            flat, paths = truth.dcp_flat(self.step), truth.dcp_paths(self.step)
        self.assertTrue(flat)
        with mounted.mounted(self.run_dir) as mnt:
            self.assertEqual(truth.wrong_checkpoint(mnt / "step", flat, paths), [])
        self.assertEqual(mounted.run("verify", self.step, "--deep", check=False).returncode, 0)

    def saved(self, world, writer, *args, **kw):
        truth.run_ranks(world, lambda rank, size: writer(rank, size, str(self.step), *args, **kw))

    def test_fsdp2_and_adamw(self):
        self.saved(2, writers.fsdp2)
        self.same()

    def test_three_threads_a_rank(self):
        self.saved(2, writers.fsdp2, thread_count=3)
        self.assertGreater(len(list(self.step.glob("*.distcp"))), 2)
        self.same()

    def test_a_file_an_item(self):
        self.saved(2, writers.fsdp2, dtype=torch.bfloat16, single_file_per_rank=False)
        self.assertGreater(len(list(self.step.glob("*.distcp"))), 10)
        self.same()

    def test_async_save(self):
        self.saved(2, writers.async_fsdp2)
        self.same()

    def test_zstandard_extension(self):
        self.saved(2, writers.zstd)
        self.same()

    def test_state_dict_not_flattened(self):
        self.saved(2, writers.unflattened)
        keys = ["a.b", "x"]
        whole = {"a.b": torch.zeros(7, 3), "x": torch.zeros(2)}
        import torch.distributed.checkpoint as dcp
        dcp.load(whole, checkpoint_id=str(self.step), planner=dcp.DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
        self.same({k: whole[k] for k in keys})

    def test_uneven_shards_on_three_ranks(self):
        self.saved(3, writers.uneven)
        self.same()

    def test_tensor_parallel_below_fsdp2(self):
        self.saved(4, writers.fsdp_tp)
        whole = torch.load(str(self.step) + ".whole.pt")
        flat = truth.dcp_flat(self.step)
        for key, tensor in whole.items():  # what the ranks gathered, beside what torch loads
            self.assertEqual(truth.raw(flat["model." + key]), truth.raw(tensor), key)
        self.same()

    def test_mesh_of_two_by_two(self):
        self.saved(4, writers.mesh)
        self.same()

    def test_every_dtype_layout_and_odd_name(self):
        writers.single(0, 1, str(self.step), writers.dtypes_state())
        self.same()

    def test_replicas_of_two_ranks(self):
        self.saved(2, writers.single, {"model": {f"w{i}": truth.values((5, i + 1), seed=i) for i in range(9)}})
        self.same()

    def test_a_smaller_world_overwrites_in_place(self):
        self.saved(3, writers.fsdp2, 1)
        self.saved(2, writers.fsdp2, 2)
        self.assertTrue((self.step / "__2_0.distcp").exists(), "the larger world's file is still there")
        self.same()

    def test_a_metadata_a_rank(self):
        self.saved(3, writers.rank_local)
        self.assertFalse((self.step / ".metadata").exists())
        with mounted.mounted(self.run_dir) as mnt:
            want = {"w": truth.values((13, 5), torch.float32, 1), "r": torch.arange(3)}
            self.assertEqual(truth.wrong_tensors(mnt / "step", want), [])

    def test_objects(self):
        state = writers.objects_state()
        writers.single(0, 1, str(self.step), state)
        self.same()
        flat = truth.dcp_flat(self.step)
        with mounted.mounted(self.run_dir) as mnt:
            objects = json.loads((mnt / "step" / ".unshard" / "objects.json").read_text(encoding="utf-8"))
        for key, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self.assertEqual(objects[key], value, key)

    def test_hugging_face_writer(self):
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        import torch.distributed.checkpoint as dcp
        os.mkdir(self.step)
        state = {f"l.{i}.w": truth.values((7 + i, 5), torch.float32 if i % 2 else torch.bfloat16, i) for i in range(5)}
        files = {k: 1 + i // 3 for i, k in enumerate(state)}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(self.step), fqn_to_index_mapping=files), no_dist=True)
        self.same(truth.hf_writer_flat(str(self.step)))

    def test_hugging_face_writer_of_four_ranks(self):
        self.saved(4, writers.hugging_face, 2, False)
        self.assertFalse((self.step / "model.safetensors.index.json").exists(), "only shards")
        self.same(truth.hf_writer_flat(str(self.step)))

    def test_hugging_face_writer_with_whole_files_beside_the_shards(self):
        self.saved(4, writers.hugging_face, 3, True)
        self.assertTrue((self.step / "sharded").is_dir())
        self.same(truth.hf_writer_flat(str(self.step / "sharded")))

    def test_random_windows_from_eight_threads(self):
        self.saved(3, writers.large)
        flat = truth.dcp_flat(self.step)
        self.same(flat, truth.dcp_paths(self.step))
        with mounted.mounted(self.run_dir) as mnt:
            files = {k: (os.open(mnt / "step" / "raw" / k, os.O_RDONLY), truth.raw(flat[k])) for k in flat}
            self.addCleanup(lambda: [os.close(fd) for fd, _ in files.values()])
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                wrong = list(pool.map(lambda seed: wrong_windows(files, seed), range(8)))
            for fd, _ in files.values():
                os.close(fd)
            files.clear()
        self.assertEqual([w for w in wrong if w], [])


def wrong_windows(files, seed):
    """The first window of 300 that differs, of any offset and length, also past the end."""
    pick = random.Random(seed)
    for _ in range(300):
        key = pick.choice(sorted(files))
        fd, data = files[key]
        at = pick.randrange(len(data) + 10)
        size = pick.choice([1, 7, 4096, 65537, 1 << 20, 3 << 20])
        if os.pread(fd, size, at) != data[at:at + size]:
            return f"{key} {at}+{size}"
    return None
