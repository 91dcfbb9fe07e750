# SPDX-License-Identifier: MIT
"""What training frameworks do to their directories, call by call: through a mount it leaves what it leaves on a disk.

Orders and calls as recorded of the frameworks; the files are those that they wrote (tests/data). No framework is needed.
"""
import fcntl
import json
import mmap
import os
import random
import re
import shutil
import tempfile

from storagelib import COUNT, SLOW, Case, check, files_of, fixture, fixtures, lay, other_bytes, put, put_tree, sample, short
from mountlib import SANITIZED, main, make_tensors, read_all, safetensors_image, write_checkpoint

TRAINER = fixture("hf_trainer", "trainer_llama_adamw") + "/checkpoint-2"
TRAINER_ORDER = ["config.json", "generation_config.json", "model.safetensors", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


def text(w, path, words):
    os.makedirs(os.path.dirname(w / path), exist_ok=True)
    with open(w / path, "w") as f:
        f.write(words)
    w.step()


# ---- Hugging Face ----

def trainer_step(w, run, n):
    folder = f"{run}/checkpoint-{n}"
    os.makedirs(w / folder, exist_ok=True)
    for name in TRAINER_ORDER:
        put(w, w / f"{folder}/{name}", read_all(f"{TRAINER}/{name}") + (bytes([n % 256]) if name == "rng_state.pth" else b""))
    text(w, f"{folder}/trainer_state.json", json.dumps({"global_step": n}))


def trainer_rotation(w):
    """save_total_limit=2: the oldest goes, found by listing the run."""
    os.makedirs(w / "out", exist_ok=True)
    for n in (2, 4, 6, 8):
        trainer_step(w, "out", n)
        steps = sorted(int(name.split("-")[1]) for name in os.listdir(w / "out") if name.startswith("checkpoint-"))
        w.note("listed", steps)
        for old in steps[:-2]:
            shutil.rmtree(w / f"out/checkpoint-{old}")
            w.step()
    put_tree(w, TRAINER, "out", "framework", "create", None)


def trainer_by_rename(w):
    """As Trainer did for a while: a staging directory that is renamed, and fsync of the run."""
    for n in (2, 4):
        trainer_step(w, "out/tmp", n)
        os.rename(w / f"out/tmp/checkpoint-{n}", w / f"out/checkpoint-{n}")
        fd = os.open(w / "out", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        w.step()
    os.rmdir(w / "out/tmp")


def save_pretrained(w, folder, seed, shards):
    """Shards, the index; before them go the files of the last save that this one has not."""
    os.makedirs(w / folder, exist_ok=True)
    tensors = make_tensors(seed, count=8)
    keys = list(tensors)
    names = ["model.safetensors"] if shards == 1 else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    text(w, f"{folder}/config.json", '{"model_type": "llama"}')
    for name in sorted(os.listdir(w / folder)):
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", name) and name not in names:
            w.note("stale", name)
            os.remove(w / f"{folder}/{name}")
            w.step()
    for i, name in enumerate(names):
        put(w, w / f"{folder}/{name}", safetensors_image({k: tensors[k] for k in keys[i::shards]}))
    index = w / f"{folder}/model.safetensors.index.json"
    if shards > 1:
        text(w, f"{folder}/model.safetensors.index.json", json.dumps({"weight_map": {k: names[i % shards] for i, k in enumerate(keys)}}))
    elif os.path.exists(index):
        os.remove(index)


def fewer_shards(w):
    for seed, shards in enumerate((4, 2, 1, 3)):
        save_pretrained(w, "model", seed, shards)


def late_index(w):
    """All shards, a long time, the index, side files; then a save of another number of shards."""
    tensors = make_tensors(2, count=8)
    keys = list(tensors)
    for count, what in ((4, "first"), (2, "second")):
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        text(w, "model/config.json", json.dumps({"v": what}))
        for i, name in enumerate(names):
            put(w, w / f"model/{name}", safetensors_image({k: tensors[k] for k in keys[i::count]}))
        text(w, "model/model.safetensors.index.json", json.dumps({"weight_map": {k: names[i % count] for i, k in enumerate(keys)}}))
        for name in ("tokenizer.json", "generation_config.json"):
            text(w, f"model/{name}", what + name)


def older_model(run):
    write_checkpoint(run + "/model", make_tensors(1, count=8), shards=4)


def accelerate(w):
    """save_state with total_limit: what is too old goes first, by listing."""
    names = ["model.safetensors", "optimizer.bin", "scheduler.bin", "sampler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"]
    for n in range(4):
        os.makedirs(w / "checkpoints", exist_ok=True)
        old = sorted(os.listdir(w / "checkpoints"), key=lambda name: int(name.split("_")[1]))
        w.note("listed", old)
        for name in old[:max(0, len(old) + 1 - 2)]:
            shutil.rmtree(w / f"checkpoints/{name}")
            w.step()
        os.makedirs(w / f"checkpoints/checkpoint_{n}")
        for name in names:
            data = safetensors_image(make_tensors(n)) if name == "model.safetensors" else read_all(TRAINER + "/optimizer.pt")
            put(w, w / f"checkpoints/checkpoint_{n}/{name}", data)


# ---- Lightning ----

def lightning(how):
    def write(w):
        """save_top_k=1 and save_last: the new file, last.ckpt, then the file before goes."""
        data = read_all(next(p for n, p in sorted(files_of(fixture("lightning", "")).items()) if n.endswith(".ckpt")))
        os.makedirs(w / "checkpoints")
        before = None
        for n in (1, 2, 3):
            name, last = f"epoch={n}-step={n * 10}.ckpt", w / "checkpoints/last.ckpt"
            with tempfile.TemporaryDirectory() as other_disk:
                with open(other_disk + "/temporary", "wb") as f:
                    f.write(data)
                shutil.move(other_disk + "/temporary", w / f"checkpoints/{name}")  # as fsspec commits
            w.step()
            if os.path.islink(last) or os.path.isfile(last):
                os.remove(last)
            w.step()
            if how == "link":
                os.symlink(name, last)
            elif how == "hard link":
                os.link(w / f"checkpoints/{name}", last)
            else:
                put(w, last, data)
            w.step()
            if before:
                os.remove(w / f"checkpoints/{before}")
                w.step()
            before = name
            w.note("last", os.path.islink(last), os.path.getsize(last), os.stat(last).st_nlink)
    return write


# ---- PyTorch, Megatron, DeepSpeed, verl, OLMo, NeMo ----

def dcp(w, folder, path, ranks_apart=True):
    """FileSystemWriter: each rank's files are open at once and are synced; then .metadata by rename. overwrite=False looks first."""
    files = files_of(path)
    shards = sorted(n for n in files if n.endswith(".distcp"))
    os.makedirs(w / folder, exist_ok=True)
    w.note("already there", os.path.exists(w / f"{folder}/.metadata"), sorted(os.listdir(w / folder)))
    handles = {n: open(w / f"{folder}/{n}", "wb", buffering=0) for n in shards}
    parts = [(n, i) for n in shards for i in range(3)]
    if ranks_apart:
        random.Random(path).shuffle(parts)
    else:
        w.step()
    data = {n: read_all(files[n]) for n in shards}
    for n, i in parts:
        size = -(-len(data[n]) // 3)
        handles[n].seek(size * i)
        handles[n].write(data[n][size * i:size * (i + 1)])
        w.step()
    for n in reversed(shards):
        os.fsync(handles[n].fileno())
        handles[n].close()
        w.step()
    for n in sorted(files):
        if n not in shards and n != ".metadata":
            put(w, w / f"{folder}/{n}", read_all(files[n]))
    with open(w / f"{folder}/.metadata.tmp", "wb") as f:
        f.write(read_all(files[".metadata"]))
        w.step()
        os.fsync(f.fileno())
    if os.path.exists(w / f"{folder}/.metadata"):
        os.remove(w / f"{folder}/.metadata")
    os.rename(w / f"{folder}/.metadata.tmp", w / f"{folder}/.metadata")
    w.step()


DCP = [fixture("torch_dcp", n) for n in ("dcp_fsdp2_adamw_2r", "dcp_fsdp2_adamw_3r_bf16", "dcp_mesh_2x2", "dcp_threads3_2r")]


def dcp_again(w):
    """Into one directory, by other numbers of ranks: stale shards stay, as on a disk."""
    for path in DCP:
        dcp(w, "step", path)


def dcp_of_a_run(w):
    for n, path in enumerate(DCP):
        dcp(w, f"run/step-{n}", path)
        text(w, "run/latest", f"step-{n}")


def hf_writer(w):
    """HuggingFaceStorageWriter: rank files of one name pattern with the same keys, one rank late; no index until it is consolidated."""
    for n, name in enumerate(("hfdcp_fsdp2_3r", "hfdcp_grid_4", "hfdcp_fsdp2_2r_consolidated")):
        files = sorted(files_of(fixture("hf_dcp", name)).items(), key=lambda f: ("consolidated" in f[0] or f[0].startswith("model-"), f[0]))
        for file, path in reversed(files) if n == 1 else files:
            put(w, w / f"step{n}/{file}", read_all(path), "halves")


def megatron(w):
    for n, name in enumerate(("mcore019_torch_dist_tp2_pp2", "mcore018_torch_dist_commonpt", "mcore012_zarr_tp2_dp2_flat")):
        path, folder = fixture("megatron", name), f"run/iter_{n:07}"
        if ".metadata" in files_of(path):
            dcp(w, folder, path, ranks_apart=False)
        else:
            put_tree(w, path, folder, "framework", "create", None)
        text(w, "run/latest_checkpointed_iteration.txt", str(n))


def deepspeed(w):
    paths = [p for p in fixtures() if "/deepspeed/z" in p and os.path.isdir(p)][:3]
    for n, path in enumerate(paths):
        put_tree(w, path, f"run/global_step{n}", "random", "halves", random.Random(n))
        text(w, "run/zero_to_fp32.py", "print('a script')\n")
        text(w, "run/latest", f"global_step{n}")


def verl(w):
    """One directory a step, the tracker, and the step before goes."""
    paths = [p for p in fixtures() if "/verl/" in p and os.path.isdir(p)][:3]
    for n, path in enumerate(paths):
        put_tree(w, path, f"run/global_step_{n}/actor", "random", "create", random.Random(n))
        text(w, "run/latest_checkpointed_iteration.txt", str(n))
        if n:
            shutil.rmtree(w / f"run/global_step_{n - 1}")
            w.step()


def olmo(w):
    """A temporary directory that is renamed, and a link `latest` that is put in place by rename."""
    for n, path in enumerate(p for p in (fixture("olmo_core", "step9"), fixture("olmo_v0", "v00-may7-several-w3")) if os.path.isdir(p)):
        put_tree(w, path, f"run/step{n}-tmp", "random", "create", random.Random(n))
        os.replace(w / f"run/step{n}-tmp", w / f"run/step{n}")
        w.step()
        os.symlink(f"step{n}", w / "run/latest.tmp")
        w.step()
        os.replace(w / "run/latest.tmp", w / "run/latest")
        w.step()
        w.note("latest", os.readlink(w / "run/latest"), sorted(os.listdir(w / "run/latest")))


def nemo(w):
    """A mark beside it says that it is unfinished."""
    paths = [p for p in fixtures() if "/nemo/" in p and os.path.isdir(p)][:2]
    for n, path in enumerate(paths):
        os.makedirs(w / "run", exist_ok=True)
        text(w, f"run/step={n}-unfinished", "")
        put_tree(w, path, f"run/step={n}", "random", "create", random.Random(n))
        os.remove(w / f"run/step={n}-unfinished")
        w.step()
        if os.path.lexists(w / "run/last"):
            os.remove(w / "run/last")
        os.symlink(f"step={n}", w / "run/last")
        w.step()


# ---- what programs do besides ----

def logs(w):
    """A log and a file of events that are open while checkpoints come and their directory is renamed."""
    os.makedirs(w / "out/logs")
    with open(w / "out/logs/train.log", "ab", buffering=0) as log, open(w / "out/logs/events", "wb") as events:
        for n in range(3):
            log.write(f"step {n}\n".encode())
            events.write(bytes([n]) * 3000)
            save_pretrained(w, f"out/step{n}", n, 1 + n)
            log.write(b"saved\n")
            if n == 1:
                os.rename(w / "out", w / "out2")
                os.symlink("out2", w / "out")
                w.step()


def mapped(w):
    """Shards and side files written through a mapping, as numpy.memmap and tensorstore do."""
    image = safetensors_image(make_tensors(3))
    os.makedirs(w / "model", exist_ok=True)
    for name in ("model-00001-of-00001.safetensors", "a.bin"):
        fd = os.open(w / f"model/{name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(fd, len(image))
        w.step()
        with mmap.mmap(fd, len(image)) as m:
            os.close(fd)
            m[:1000] = image[:1000]
            w.step()
            m[1000:] = image[1000:]
            m.flush()
        w.step()


def locks(w):
    os.makedirs(w / "model", exist_ok=True)
    with open(w / "model/lock", "w") as a, open(w / "model/lock", "r+") as b:
        fcntl.flock(a, fcntl.LOCK_EX)
        w.step()
        w.attempt("flock", lambda: fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB))
        fcntl.flock(a, fcntl.LOCK_UN)
        w.attempt("flock", lambda: fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB))
    w.attempt("lock file", lambda: os.close(os.open(w / "model/.lock", os.O_CREAT | os.O_EXCL)))
    w.attempt("lock file", lambda: os.close(os.open(w / "model/.lock", os.O_CREAT | os.O_EXCL)))
    w.step()
    os.unlink(w / "model/.lock")


def sqlite(w):
    """A database of a tracker beside the model."""
    import sqlite3
    os.makedirs(w / "model", exist_ok=True)
    db = sqlite3.connect(w / "model/runs.db")
    db.execute("create table runs (step integer, loss real)")
    for n in range(3):
        db.execute("insert into runs values (?, ?)", (n, n / 2))
        db.commit()
        w.step()
    w.note(db.execute("select * from runs").fetchall())
    db.close()


def deep(w):
    """18 directories with names of 240 bytes in a checkpoint, and a file in the last that is opened again."""
    path = w / "model"
    fd = os.open(path, os.O_RDONLY)
    for n in range(18):
        name = chr(97 + n) * 240
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
        f = os.open("file", flags, 0o644, dir_fd=fd)
        os.write(f, b"text")
        os.close(f)
        w.step()
    os.close(fd)


def unlinked_and_renamed_over(w):
    """Open files keep their bytes when their names go."""
    a = os.open(w / "model/config.json", os.O_RDWR)
    b = os.open(w / "model/model-00001-of-00004.safetensors", os.O_RDWR)
    os.rename(w / "model/model-00002-of-00004.safetensors", w / "model/model-00001-of-00004.safetensors")
    w.step()
    os.unlink(w / "model/config.json")
    w.step()
    os.pwrite(a, b"more", 4)
    os.pwrite(b, b"more", 4)
    w.note(os.pread(a, 100, 0), os.pread(b, 100, 0), os.fstat(a).st_nlink, os.fstat(b).st_nlink)
    os.close(a)
    os.close(b)


def half_set(path):
    """A saver that was killed after its first file, over a good save."""
    def write(w):
        name = sorted(files_of(path))[0]
        put(w, w / f"step/{name}", bytes(b ^ 1 for b in read_all(f"{path}/{name}")))
    return Case(f"half a set {short(path)}", write, lambda run: other_bytes(lay_as(path, run + "/step")))


def lay_as(path, where):
    lay(path, where)
    return where


WRITERS = {f.__name__: f for f in (trainer_rotation, trainer_by_rename, fewer_shards, late_index, accelerate, dcp_again, dcp_of_a_run, hf_writer, megatron,
                                   deepspeed, verl, olmo, nemo, logs, mapped, locks, sqlite)}
WRITERS.update({f"lightning {how}": lightning(how) for how in ("copy", "link", "hard link")})
OVER = {"fewer_shards", "late_index", "mapped", "locks", "sqlite"}  # these write to model/
ALWAYS_OVER = {f.__name__: f for f in (deep, unlinked_and_renamed_over)}


def test_recorded_writers(t):
    cases = [Case(name, write) for name, write in WRITERS.items()]
    over = {**{name: WRITERS[name] for name in OVER}, **ALWAYS_OVER}
    cases += [Case(f"{name} {how}", write, older_model, how == "read") for name, write in over.items() for how in ("over", "read")]
    check(t, cases)


def trainer_over_another(w):
    trainer_step(w, "run", 500)


def test_a_trainer_over_an_older_save(t):
    older = [TRAINER, *(fixture("torch_dcp", n) for n in ("dcp_fsdp2_adamw_2r", "dcp_mesh_2x2"))]
    check(t, [Case(f"over {short(p)}", trainer_over_another, lambda run, p=p: lay(p, run + "/run/checkpoint-500"), True) for p in older])


def test_half_a_set(t):
    """On a disk it is there, half: nothing is held back."""
    paths = [p for p in fixtures() if os.path.isdir(p) and len(files_of(p)) > 1]
    check(t, [half_set(p) for p in sample(paths, 6 if SANITIZED else 16)], pauses=[3])


def test_on_a_slow_disk(t):
    """Each fsync of the server takes long: what is written meanwhile is neither lost nor refused."""
    if not SLOW:
        return
    env = {**os.environ, "LD_PRELOAD": SLOW, "SLOW_SYNC_MS": "300", "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
    names = ["trainer_rotation", "trainer_by_rename", "late_index", "dcp_of_a_run", "olmo", "fewer_shards"]
    check(t, [Case(f"{n} {i}", WRITERS[n]) for n in names for i in range(2)], pauses=[0.5], env=env)


def test_the_check_itself(t):
    cases = [Case(name, write) for name, write in WRITERS.items()] + [Case(f"{name} over", write, older_model) for name, write in ALWAYS_OVER.items()]
    check(t, cases, pauses=[0.01], mount=False)


if __name__ == "__main__":
    main(globals(), 100000 if COUNT else 600)
