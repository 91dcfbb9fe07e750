#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Which of several files are the model, what is missing, and what stands in a file's place: directories made here."""
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile

UNSHARD = os.path.abspath(os.environ["UNSHARD"])
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 440473133\n"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def weights(**tensors):
    """A safetensors file: NAME=(number of elements, value)."""
    header, data = {}, b""
    for name, (count, value) in tensors.items():
        part = struct.pack("<f", value) * count
        header[name] = {"dtype": "F32", "shape": [count], "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def saved(**tensors):
    """The same as torch.save writes it."""
    def text(s):
        return b"X" + struct.pack("<I", len(s)) + s.encode()
    graph, out = b"\x80\x02}(", io.BytesIO()
    for name, (count, _) in tensors.items():
        n = b"K" + bytes([count])
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(name) + text("cpu") + n + b"tQ"
        graph += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0(" + n + b"t(K\1t\x89ccollections\nOrderedDict\n)RtR"
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("model/data.pkl", graph + b"u.")
        z.writestr("model/byteorder", "little")
        for name, (count, value) in tensors.items():
            z.writestr("model/data/" + name, struct.pack("<f", value) * count)
        z.writestr("model/version", "3\n")
    return out.getvalue()


def index(**files):
    return json.dumps({"metadata": {}, "weight_map": {k: f.replace("__", "-") for k, f in files.items()}})


class Place:
    """A model's directory, and the program run on it."""

    def __init__(self, scratch, files):
        self.path = tempfile.mkdtemp(dir=scratch)
        self.cache = tempfile.mkdtemp(dir=scratch)
        for name, content in {"config.json": "{}", **files}.items():
            with open(f"{self.path}/{name}", "wb") as f:
                f.write(content.encode() if isinstance(content, str) else content)

    def run(self, *words):
        done = subprocess.run([UNSHARD, *words], capture_output=True, text=True, check=False, env={**os.environ, "XDG_CACHE_HOME": self.cache})
        return done.returncode, done.stdout + done.stderr

    def model(self):
        """{key: first value} of role model; None for what cannot be read."""
        table = json.loads(subprocess.run([UNSHARD, "ls", self.path, "--json"], capture_output=True, check=True,
                                          env={**os.environ, "XDG_CACHE_HOME": self.cache}).stdout)["tensors"]
        found = {}
        for row in (r for r in table if r["role"] == "model"):
            data = subprocess.run([UNSHARD, "cat", self.path, row["key"]], capture_output=True, check=False,
                                  env={**os.environ, "XDG_CACHE_HOME": self.cache})
            found[row["key"]] = None if data.returncode else struct.unpack("<f", data.stdout[:4])[0]
        return found


SHARDS = {ONE: weights(a=(2, 1)), TWO: weights(b=(2, 2))}
BIN = "pytorch_model-00001-of-00002.bin"
BINS = {BIN: saved(a=(2, 1)), "pytorch_model-00002-of-00002.bin": saved(b=(2, 2))}
# (what, files, the model (None: any), words of info, words that are not there, status of verify)
ROWS = [
    ("an index of another number of files", {**SHARDS, INDEX: index(a="model-00001-of-00003.safetensors", b="model-00003-of-00003.safetensors")},
     {"a": 1, "b": 2}, ["passed over", f"remove {INDEX}", "complete     yes"], [], 0),
    ("an index of which one file is there", {**SHARDS, INDEX: index(a=ONE, b="model-00003-of-00003.safetensors")},
     {"a": 1, "b": 2}, [f"remove {INDEX}", "1 of the 2 files that it names are missing"], [], 0),
    ("an index that lists nothing", {**SHARDS, INDEX: index()}, {"a": 1, "b": 2}, ["it lists nothing", f"remove {INDEX}"], [], 0),
    ("an index that lists nothing beside one file", {"model.safetensors": weights(a=(2, 1)), INDEX: index()}, {"a": 1}, ["it lists nothing"], [], 0),
    ("an index of missing files that only vLLM goes by", {"model.safetensors": weights(a=(2, 1)), INDEX: index(a=ONE)}, {"a": 1},
     ["complete     yes", f"vLLM goes by it: get it again, or remove {INDEX}"], ["transformers goes"], 0),
    ("an index of a variant's missing files misleads nobody",
     {"model.safetensors": weights(a=(2, 1)), "model.safetensors.index.fp16.json": index(a="model.fp16-00001-of-00002.safetensors")}, {"a": 1},
     ["complete     yes", "passed over  model.safetensors.index.fp16.json"], ["goes by it", "or remove"], 0),
    ("an index of other keys", {**SHARDS, INDEX: index(x=ONE, y=TWO)}, {"a": 1, "b": 2}, ["complete     no", f"remove {INDEX}"], [], 1),
    ("a key in two files: the last one's", {ONE: weights(a=(2, 1)), TWO: weights(a=(2, 9), b=(2, 2)), INDEX: index(a=ONE, b=TWO)},
     {"a": 9, "b": 2}, ["duplicate-key"], [], 0),
    ("a key in two files, and no index", {ONE: weights(a=(2, 1)), TWO: weights(a=(2, 9), b=(2, 2))}, {"a": None, "b": 2}, ["no index decides"], [], 1),
    ("a single file that is cut", {**SHARDS, INDEX: index(a=ONE, b=TWO), "model.safetensors": weights(a=(200, 7))[:300]},
     {"a": 1, "b": 2}, ["passed over  model.safetensors", "it is cut"], [], 0),
    ("a single file beside an index: transformers' order", {**SHARDS, INDEX: index(a=ONE, b=TWO), "model.safetensors": weights(a=(2, 7))},
     {"a": 7}, ["passed over  model.safetensors.index.json: model.safetensors comes first"], [], 0),
    ("a file that the index names is missing", {ONE: weights(a=(2, 1)), INDEX: index(a=ONE, b=TWO)}, {"a": 1, "b": None}, ["complete     no"], [], 1),
    ("numbers of several widths", {"model-9-of-10.safetensors": weights(a=(2, 1)), "model-10-of-10.safetensors": weights(b=(2, 2))},
     {"a": 1, "b": 2}, ["complete     no: 8 of the 10 files"], [], 1),
    ("a variant without an index", {"model.fp16-00001-of-00001.safetensors": weights(a=(2, 1))}, {"a": 1}, ["complete     yes"], [], 0),
    ("a set of .bin files without an index", BINS, {"a": 1, "b": 2}, ["complete     yes"], ["passed over"], 0),
    ("such a set beside a variant in one file, which transformers loads for who asks", {**BINS, "model.fp16.safetensors": weights(a=(2, 7), b=(2, 8))},
     {"a": 7, "b": 8}, ["complete     yes", f"passed over  {BIN}: model.fp16.safetensors goes first; transformers loads neither unless asked"], [], 0),
    ("a part of such a set beside it", {BIN: BINS[BIN], "model.fp16.safetensors": weights(a=(2, 7), b=(2, 8))},
     {"a": 7, "b": 8}, ["complete     yes", f"passed over  {BIN}: 1 of its 2 files are missing"], [], 0),
    ("such a set beside files of other names",
     {**BINS, "consolidated.safetensors": weights(a=(2, 7), b=(2, 8)), "other.safetensors": weights(a=(2, 9))}, {"a": 1, "b": 2},
     [f"passed over  {name}: transformers loads neither this nor the set of {BIN}" for name in ("consolidated.safetensors", "other.safetensors")], [], 0),
    ("safetensors by their numbers beside a variant of .bin", {**SHARDS, "pytorch_model.fp16.bin": saved(a=(2, 7), b=(2, 8))}, {"a": 1, "b": 2},
     [f"passed over  pytorch_model.fp16.bin: {ONE} goes first"], [], 0),
    ("a variant beside the model", {"model.safetensors": weights(a=(2, 1)), "model.fp16.safetensors": weights(a=(2, 7))}, {"a": 1},
     ["passed over  model.fp16.safetensors: model.safetensors comes first in transformers' order"], [], 0),
    ("a variant beside a model that is cut", {"model.safetensors": weights(a=(200, 1))[:300], "model.fp16.safetensors": weights(a=(2, 7))}, {"a": 7},
     ["complete     yes", "passed over  model.safetensors: ", "it is cut"], [], 0),
    ("a variant alone", {"model.fp16.safetensors": weights(a=(2, 7))}, {"a": 7}, ["complete     yes"], ["passed over"], 0),
    ("files that are read beside the model", {**SHARDS, "value_head.safetensors": weights(v=(2, 3))}, {"a": 1, "b": 2}, ["complete     yes"],
     ["passed over"], 0),
    ("names that no loader knows do not count beside those that some do",
     {ONE: weights(a=(2, 1)), "optimizer-00001-of-00001.safetensors": weights(m=(2, 5))}, {"a": 1}, ["complete     no"], [], 1),
    ("a pointer in place of a shard", {ONE: weights(a=(2, 1)), TWO: POINTER, INDEX: index(a=ONE, b=TWO)}, {"a": 1, "b": None}, ["git lfs pull"], [], 1),
    ("a pointer in place of a side file", {"model.safetensors": weights(a=(2, 1)), "tokenizer.model": POINTER}, {"a": 1},
     ["complete     no: tokenizer.model is a pointer", "git lfs pull"], [], 1),
    ("a pointer in place of another form of the model",
     {"model.safetensors": weights(a=(2, 1)), "pytorch_model.bin": POINTER, "consolidated.safetensors": POINTER, "tf_model.h5": POINTER}, {"a": 1},
     ["complete     yes", "passed over  tf_model.h5 is a pointer", "passed over  consolidated.safetensors is a pointer"], ["git lfs pull"], 0),
    ("a pointer in place of another form of a model that is not whole",
     {ONE: weights(a=(2, 1)), INDEX: index(a=ONE, b=TWO), "tf_model.h5": POINTER}, {"a": 1, "b": None}, ["complete     no", "git lfs pull"], [], 1),
    ("AppleDouble files", {"model.safetensors": weights(a=(2, 1)), "._model.safetensors": b"\0\5\x16\7" + bytes(100)}, {"a": 1}, ["complete     yes"], ["damaged"], 0),
    ("tensors without elements, beside a model that no loader looks for",
     {"model.safetensors": weights(a=(0, 1), b=(0, 1)), "consolidated.safetensors": weights(a=(2, 1), b=(2, 2))}, None,
     ["complete     no: none of the model's 2 tensors has elements"], [], 1),
    ("whole, and nothing to tell", {**SHARDS, INDEX: index(a=ONE, b=TWO)}, {"a": 1, "b": 2}, ["complete     yes"], ["passed over", "warning"], 0),
]


def test_choices(scratch):
    for what, files, model, says, never, verified in ROWS:
        place = Place(scratch, files)
        assert model is None or place.model() == model, f"{what}: {place.model()}"
        status, said = place.run("info", place.path)
        assert status == 0 and all(w in said for w in says) and not any(w in said for w in never), f"{what}: {said}"
        status, said = place.run("verify", place.path)
        assert status == verified, f"{what}: verify gives {status}: {said}"


def test_origins(scratch):
    """One command says which file a tensor is from, and why that one."""
    place = Place(scratch, {**SHARDS, INDEX: index(a=ONE, b=TWO), "model.safetensors": weights(a=(200, 7))[:300]})
    for words in (["plan", place.path, "b"], ["info", "-v", place.path]):
        said = place.run(*words)[1]
        assert f"{TWO}: the files that {INDEX} names, read whole; the first whole one of 2 candidates" in said, said
    said = place.run("plan", place.path, "b", "--json")[1]
    assert json.loads(said)["origin"]["file"] == TWO, said
    report = json.loads(place.run("info", place.path, "--json")[1])
    row = next(t for t in report["tensors"] if t["key"] == "b")
    assert report["files"][row["origin"]["file"]]["path"] == TWO, row
    assert INDEX in report["origins"][row["origin"]["rule"]]["rule"] and report["complete"] is True, row


def test_links_out_of_the_source(scratch):
    place = Place(scratch, {})
    with open(scratch + "/real.safetensors", "wb") as f:
        f.write(weights(a=(2, 1)))
    os.symlink("../real.safetensors", place.path + "/model.safetensors")
    for verb in "info", "verify", "ls":
        status, said = place.run(verb, place.path)
        assert status == 3 and "model.safetensors" in said and "follow_symlinks" in said, said
    assert place.run("verify", place.path, "-o", "follow_symlinks")[0] == 0


def test_convert_of_what_is_not_complete(scratch):
    place = Place(scratch, {ONE: weights(a=(2, 1))})
    status, said = place.run("convert", place.path, scratch + "/out", "--to", "hf")
    assert status == 3 and "1 of the 2 files" in said and "--incomplete" in said and not os.path.exists(scratch + "/out"), said
    status, said = place.run("convert", place.path, scratch + "/out", "--to", "hf", "--incomplete")
    assert status == 0 and "warning: missing-file" in said, said
    place = Place(scratch, {ONE: weights(a=(2, 1)), INDEX: index(a=ONE, b=TWO)})
    status, said = place.run("convert", place.path, scratch + "/out2", "--to", "hf", "--incomplete")
    assert status == 0 and sorted(os.listdir(scratch + "/out2")) == ["config.json", "model.safetensors"], said


def main():
    tests = [f for name, f in sorted(globals().items()) if name.startswith("test_")]
    print(f"1..{len(tests)}")
    failed = 0
    for test in tests:
        with tempfile.TemporaryDirectory(prefix="ufs-choices-") as scratch:
            try:
                test(scratch)
                print(f"ok - {test.__name__}")
            except AssertionError as e:
                failed += 1
                print(f"not ok - {test.__name__}\n# " + str(e).replace("\n", "\n# "))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
