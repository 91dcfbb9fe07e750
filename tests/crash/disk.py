# SPDX-License-Identifier: MIT
"""What a disk may hold after a power loss: the operations that faults.c recorded, less some that no fsync covered.

Data: each write and each change of length that no fsync(file) or syncfs followed is kept, lost, or (a write) kept in some
of its 512-byte sectors, one by one. Names: each directory keeps a first part of the changes that no fsync(directory)
followed, its own first part; a rename is one change of both directories. A fsync of a file says nothing of its name, as
POSIX has it.
"""
import os
import shutil
import stat

SECTOR = 512


class Node:
    """A file (data) or directory (entries)."""

    def __init__(self, directory):
        self.data = None if directory else bytearray()
        self.entries = {} if directory else None


class Op:
    def __init__(self, index, kind, dirs=(), node=None, names=(), at=0, data=b"", flags=0):
        self.index, self.kind, self.dirs, self.node = index, kind, dirs, node
        self.names, self.at, self.data, self.flags = names, at, data, flags


class Recording:
    """The state of a directory before a program ran, and what the program did."""

    def __init__(self, root):
        self.root = root
        self.first, self.old = {}, {}
        self.top = self._scan(root)
        self.ops = []

    def _scan(self, path):
        st = os.lstat(path)
        node = Node(stat.S_ISDIR(st.st_mode))
        if st.st_ino in self.first:
            return self.first[st.st_ino]
        self.first[st.st_ino] = node
        if node.entries is None:
            with open(path, "rb") as f:
                node.data = bytearray(f.read())
            self.old[id(node)] = bytes(node.data)
        else:
            node.entries = {n: self._scan(os.path.join(path, n)) for n in sorted(os.listdir(path))}
            self.old[id(node)] = dict(node.entries)
        return node

    def load(self, log):
        with open(log + ".data", "rb") as f:
            data = f.read()
        nodes = dict(self.first)
        with open(log) as f:
            for index, line in enumerate(f):
                self.ops.append(self._op(index, line.rstrip("\n").split("\t"), nodes, data))

    @staticmethod
    def _op(index, w, nodes, data):
        def node(text):
            return nodes.setdefault(int(text), Node(False))

        kind = w[0]
        if kind in "CD":
            made = nodes[int(w[3])] = Node(kind == "D")
            return Op(index, kind, (node(w[1]),), made, (w[2],))
        if kind == "L":
            return Op(index, kind, (node(w[1]),), node(w[3]), (w[2],))
        if kind == "U":
            return Op(index, kind, (node(w[1]),), None, (w[2],))
        if kind == "R":
            return Op(index, kind, (node(w[1]), node(w[3])), None, (w[2], w[4]), flags=int(w[5]))
        if kind == "W":
            start = int(w[4])
            return Op(index, kind, (), node(w[1]), at=int(w[2]), data=data[start:start + int(w[3])])
        if kind == "T":
            return Op(index, kind, (), node(w[1]), at=int(w[2]))
        if kind == "S":
            return Op(index, kind, (), node(w[1]))
        assert kind in "EXY", w
        return Op(index, kind)

    def _reset(self):
        for op in self.ops:
            if op.kind in "CD":
                op.node.data = None if op.kind == "D" else bytearray()
                op.node.entries = {} if op.kind == "D" else None
        for node in self.first.values():
            old = self.old[id(node)]
            if node.entries is None:
                node.data = bytearray(old)
            else:
                node.entries = dict(old)

    def crash(self, count, rnd, path):
        """Writes to `path` what may be there when the power went after `count` operations."""
        self._reset()
        ops = self.ops[:count]
        for op in names_kept(ops, rnd):
            change_names(op)
        for op in data_kept(ops, rnd):
            change_data(op)
        write_out(self.top, path)


class SameInodes(Recording):
    """States of the disk in which the files and directories that were there before are the same inodes: transactions know them by these."""

    def __init__(self, root, keep):
        super().__init__(root)
        self.kept = {}
        shutil.rmtree(keep, ignore_errors=True)
        os.mkdir(keep)
        for path, _, files in os.walk(root):
            for name in files:
                node = self.first[os.lstat(os.path.join(path, name)).st_ino]
                self.kept[id(node)] = os.path.join(keep, str(len(self.kept)))
                os.link(os.path.join(path, name), self.kept[id(node)])

    def crash(self, count, rnd, path):
        self._reset()
        ops = self.ops[:count]
        for op in names_kept(ops, rnd):
            change_names(op)
        for op in data_kept(ops, rnd):
            change_data(op)
        self._write(self.top, path, {})

    def _write(self, node, path, made):
        for name in os.listdir(path):
            at = os.path.join(path, name)
            if not os.path.isdir(at):
                os.unlink(at)
            elif name not in node.entries or node.entries[name].entries is None:
                shutil.rmtree(at)
        for name, child in node.entries.items():
            at = os.path.join(path, name)
            if child.entries is not None:
                os.makedirs(at, exist_ok=True)
                os.chmod(at, 0o755)  # as a staging directory must be
                self._write(child, at, made)
            elif id(child) in self.kept or id(child) in made:
                os.link(self.kept.get(id(child)) or made[id(child)], at)
            else:
                made[id(child)] = at
                with open(at, "wb") as f:
                    f.write(child.data)


def names_kept(ops, rnd):
    """A part of the changes of names that is closed: all that a directory had before, it has."""
    changes = [op for op in ops if op.dirs]
    forced, after = set(), {}
    for op in reversed(ops):  # what is forced forces what its directories had before it
        if op.kind == "Y":
            forced.update(c.index for c in changes if c.index < op.index)
        elif op.kind == "S":
            after[id(op.node)] = True
        elif op.dirs and (op.index in forced or any(id(d) in after for d in op.dirs)):
            forced.add(op.index)
            after.update({id(d): True for d in op.dirs})
    keep = rnd.choice((0.0, 0.5, 0.9, 1.0))
    ended, kept = set(), []
    for op in changes:
        if op.index in forced or (not any(id(d) in ended for d in op.dirs) and rnd.random() < keep):
            kept.append(op)
        else:
            ended.update(id(d) for d in op.dirs)
    return kept


def data_kept(ops, rnd):
    synced, kept = set(), []
    all_synced = False
    keep = rnd.choice((0.0, 0.5, 0.9, 1.0))
    for op in reversed(ops):
        all_synced |= op.kind == "Y"
        if op.kind == "S":
            synced.add(id(op.node))
        elif op.kind in "WT":
            if all_synced or id(op.node) in synced or rnd.random() < keep:
                kept.append(op)
            elif op.kind == "W" and rnd.random() < 0.3:
                kept.append(torn(op, rnd))
    return reversed(kept)


def torn(op, rnd):
    """Some sectors of a write."""
    first = rnd.randrange(0, len(op.data)) // SECTOR * SECTOR
    return Op(op.index, "W", (), op.node, at=op.at + first, data=op.data[first:first + SECTOR * rnd.randint(1, 8)])


def change_names(op):
    here = op.dirs[0].entries
    if op.kind in "CDL":
        here[op.names[0]] = op.node
    elif op.kind == "U":
        here.pop(op.names[0], None)
    else:
        there = op.dirs[1].entries
        a, b = op.names
        if op.flags & 2:
            here[a], there[b] = there[b], here[a]
        else:
            there[b] = here.pop(a)


def change_data(op):
    data = op.node.data
    if op.kind == "W":
        if len(data) < op.at:
            data.extend(bytes(op.at - len(data)))
        data[op.at:op.at + len(op.data)] = op.data
    elif op.at < len(data):
        del data[op.at:]
    else:
        data.extend(bytes(op.at - len(data)))


def write_out(node, path):
    shutil.rmtree(path, ignore_errors=True)
    made = {}

    def write(n, at):
        if n.entries is None:
            if id(n) in made:
                os.link(made[id(n)], at)
                return
            made[id(n)] = at
            with open(at, "wb") as f:
                f.write(n.data)
            return
        os.mkdir(at)
        for name, child in n.entries.items():
            write(child, os.path.join(at, name))

    write(node, path)


def tree(path):
    """{name: bytes} of what lies below a directory, directories as None; {} when it is not there."""
    found = {}
    for root, dirs, files in os.walk(path):
        for d in dirs:
            found[os.path.relpath(os.path.join(root, d), path)] = None
        for f in files:
            with open(os.path.join(root, f), "rb") as data:
                found[os.path.relpath(os.path.join(root, f), path)] = data.read()
    return found
